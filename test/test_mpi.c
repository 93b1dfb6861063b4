// test_mpi.c: proves that mpi_alone.h does for one rank what MPI does. Every function that the
// program calls is called here as the program calls it, except messages to other ranks, of which
// there are none. Built twice: build/test_mpi with the installed MPI, which says what is right, and
// build/test_mpi_alone.
#include "comm/mpi.h"

#include "harness.h"

static void test_groups(void **state) {
    (void)state;
    MPI_Comm all, here;
    int rank = -1, ranks = -1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    assert_int_equal(rank, 0);
    assert_int_equal(ranks, 1);
    assert_int_equal(MPI_Comm_dup(MPI_COMM_WORLD, &all), MPI_SUCCESS);
    assert_int_equal(MPI_Comm_set_errhandler(all, MPI_ERRORS_RETURN), MPI_SUCCESS);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
    const MPI_Comm groups[] = {all, here};
    for (int i = 0; i < 2; i++) {
        rank = ranks = -1;
        MPI_Comm_rank(groups[i], &rank);
        MPI_Comm_size(groups[i], &ranks);
        assert_int_equal(rank, 0);
        assert_int_equal(ranks, 1);
    }
    assert_int_equal(MPI_Comm_free(&all), MPI_SUCCESS);
    assert_int_equal(MPI_Comm_free(&here), MPI_SUCCESS);
}

static void test_collectives(void **state) {
    (void)state;
    int number = 42, gathered = -1;
    assert_int_equal(MPI_Bcast(&number, 1, MPI_INT, 0, MPI_COMM_WORLD), MPI_SUCCESS);
    assert_int_equal(number, 42);
    assert_int_equal(MPI_Allgather(&number, 1, MPI_INT, &gathered, 1, MPI_INT, MPI_COMM_WORLD),
                     MPI_SUCCESS);
    assert_int_equal(gathered, 42);
    char mine[100], all[102];
    for (int i = 0; i < 100; i++) { mine[i] = (char)(i + 1); }
    memset(all, -1, sizeof all);
    MPI_Allgather(mine, 100, MPI_BYTE, all + 1, 100, MPI_BYTE, MPI_COMM_WORLD);
    assert_memory_equal(all + 1, mine, 100);
    assert_int_equal(all[0], -1);
    assert_int_equal(all[101], -1);
}

// The watch listens to other ranks; a question that none asks never arrives.
static void test_a_receive_that_nobody_answers(void **state) {
    (void)state;
    MPI_Request request;
    MPI_Status status;
    int64_t heard = 7;
    int done = 1;
    MPI_Recv_init(&heard, 1, MPI_INT64_T, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
    assert_int_equal(MPI_Start(&request), MPI_SUCCESS);
    for (int i = 0; i < 3; i++) {
        done = 1;
        assert_int_equal(MPI_Test(&request, &done, &status), MPI_SUCCESS);
        assert_false(done);
        done = 1;
        MPI_Request_get_status(request, &done, MPI_STATUS_IGNORE);
        assert_false(done);
    }
    assert_true(request != MPI_REQUEST_NULL);
    assert_int_equal(heard, 7);
    assert_int_equal(MPI_Cancel(&request), MPI_SUCCESS);
    assert_int_equal(MPI_Request_free(&request), MPI_SUCCESS);
    assert_true(request == MPI_REQUEST_NULL);
}

static void test_no_request(void **state) {
    (void)state;
    MPI_Request requests[3] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    int done = 0, which[3];
    assert_int_equal(MPI_Test(&requests[0], &done, MPI_STATUS_IGNORE), MPI_SUCCESS);
    assert_true(done);
    for (int n = 0; n <= 3; n += 3) {
        done = 1;
        MPI_Testsome(n, requests, &done, which, MPI_STATUSES_IGNORE);
        assert_int_equal(done, MPI_UNDEFINED);
    }
    assert_true(MPI_UNDEFINED < 0); // messages.h counts on it
}

static void test_texts(void **state) {
    (void)state;
    char text[MPI_MAX_LIBRARY_VERSION_STRING], error[MPI_MAX_ERROR_STRING];
    int n = 0;
    assert_int_equal(MPI_Get_library_version(text, &n), MPI_SUCCESS);
    assert_true(n > 0 && strlen(text) > 0 && strlen(text) < sizeof text);
    assert_true(HAS_MPI || strstr(text, "without MPI"));
    assert_int_equal(MPI_Error_string(1, error, &n), MPI_SUCCESS);
    assert_true(n > 0 && strlen(error) > 0 && strlen(error) < sizeof error);
}

#ifdef WITHOUT_MPI
static void send(const void *unused) {
    (void)unused;
    MPI_Request request;
    MPI_Isend(&request, 1, MPI_BYTE, 3, 0, MPI_COMM_WORLD, &request);
}
static void receive(const void *unused) {
    (void)unused;
    MPI_Request request;
    MPI_Irecv(&request, 1, MPI_BYTE, 3, 0, MPI_COMM_WORLD, &request);
}
static void abort_job(const void *code) { MPI_Abort(MPI_COMM_WORLD, *(const int *)code); }
static void test_ends(void **state) {
    (void)state;
    char message[1000];
    assert_int_equal(run_child(send, NULL, message, sizeof message), EXIT_PEER);
    assert_non_null(strstr(message, "rank 3"));
    assert_int_equal(run_child(receive, NULL, message, sizeof message), EXIT_PEER);
    const int code = EXIT_RESOURCES;
    assert_int_equal(run_child(abort_job, &code, message, sizeof message), code);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_a_receive_that_nobody_answers),
        cmocka_unit_test(test_no_request),
        cmocka_unit_test(test_texts),
#ifdef WITHOUT_MPI
        cmocka_unit_test(test_ends),
#endif
    };
    int provided = -1;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    int failed = provided < MPI_THREAD_FUNNELED;
    failed += cmocka_run_group_tests(tests, NULL, NULL);
    MPI_Finalize();
    return failed;
}
