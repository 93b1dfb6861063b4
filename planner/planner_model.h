// planner_model.h: the model that the planner plans for: a list of units, each with the time that a
// micro-batch takes forward and backward, the bytes of activations and parameters, and the bytes
// that cross the border before the unit. All of these but the parameters grow with the samples.
// Prefix sums give the cost of any stage. It is read from a profile (--profile), or timed
// (auto_stages.h).
#ifndef PLANNER_MODEL_H
#define PLANNER_MODEL_H

#include "base/base.h"
#include "base/json.h"
#include "options.h"

enum { PLAN_UNITS = 4096, PLAN_EDGES = 1 << 16, PLAN_STAGES = 256, PLAN_ROWS = 24 };
// [units + 1] seconds in the units before this one: of each sample, and of each pass, however few
// its samples are
typedef struct {
    double *row, *pass;
} UnitSeconds;
// What an optimizer of whole matrices needs in a stage with blocks: how many matrices a block has
// (0: it needs none); bytes of a block's directions, of those that are in matrices, and of the
// largest matrix; its scratch memory (matrices.h); seconds in which one rank makes the matrices of
// a block orthogonal, and the one that takes longest
typedef struct {
    int count;
    double block, of_matrices, largest, scratch, block_s, longest_s;
} PlanMatrices;
typedef struct {
    int units;
    UnitSeconds forward, backward, weight; // weight: the part of backward that is weight parts
    // [units + 1] bytes of activations that a sample's backward pass needs from the units before:
    // all; those that are left where the rest is recomputed. Those of a model, not of a profile,
    // are kept beside the inputs that units get from others of their stage.
    double *activations, *kept, *inputs;
    // bytes that are recomputed at once of a sample: those of a unit; INFINITY: of the whole stage
    double again;
    // [units + 1] further bytes of gradients that a sample's waiting weight parts need
    double *waiting;
    double *parameters; // [units + 1] bytes of the parameters' gradients in the units before
    // [units + 1] bytes of a sample that cross the border before this unit; 0 at both ends
    double *cut;
    // [units] the first unit of a row, up to this one, that have the same times and parameters
    int *alike;
    // of a sample, what passes from a unit to the next; of 2^i samples, buffers that a rank has
    // whatever its units are; of these, for a sample, gradients that units use in turns, but not
    // where weight parts wait (all 0 for a profile)
    double boundary, buffers[PLAN_ROWS], turns;
    PlanMatrices matrices; // all 0 for a profile
    double tied;           // parameters that the first and the last unit share
    // of each unit but the first and last one: bytes of the gradients of experts that only every
    // expert_ranks-th rank of a stage has, which are among `parameters`; 0 ranks: no such experts
    double experts;
    int expert_ranks;
    // of the unit that was added last: times and parameters; times of a pass
    double last[3], last_pass[2];
} PlanModel;

static inline PlanModel plan_model_make(int units) {
    const size_t n = (size_t)units + 1;
    PlanModel m = {.units = units, .again = INFINITY};
    double *next = new_array(double, 12 * n, "model"),
           **arrays[] = {&m.forward.row, &m.forward.pass, &m.backward.row, &m.backward.pass,
                         &m.weight.row,  &m.weight.pass,  &m.activations,  &m.kept,
                         &m.inputs,      &m.waiting,      &m.parameters,   &m.cut};
    for (size_t i = 0; i < LENGTH_OF(arrays); i++, next += n) { *arrays[i] = next; }
    m.alike = new_array(int, n, "model");
    return m;
}
static inline void plan_model_free(PlanModel *m) {
    free_all(m->forward.row, m->alike);
    memset(m, 0, sizeof *m);
}
// Appends unit u: the costs of a sample in it, and the bytes of its gradients. Units are added in
// order. Half of the backward pass counts as the weight part, as for matrix products, and a waiting
// weight part needs one gradient for each activation; nothing is left where a stage is recomputed.
// plan_model_split() and plan_model_keep() replace these assumptions.
static inline void plan_model_add(PlanModel *m, int u, double forward_s, double backward_s,
                                  double activation_bytes, double gradient_bytes) {
    m->forward.row[u + 1] = m->forward.row[u] + forward_s;
    m->backward.row[u + 1] = m->backward.row[u] + backward_s;
    m->weight.row[u + 1] = m->weight.row[u] + backward_s / 2;
    m->forward.pass[u + 1] = m->forward.pass[u];
    m->backward.pass[u + 1] = m->backward.pass[u];
    m->weight.pass[u + 1] = m->weight.pass[u];
    m->activations[u + 1] = m->activations[u] + activation_bytes;
    m->parameters[u + 1] = m->parameters[u] + gradient_bytes;
    m->waiting[u + 1] = m->waiting[u] + activation_bytes;
    m->kept[u + 1] = m->kept[u];
    m->inputs[u + 1] = m->inputs[u];
    const double added[] = {forward_s, backward_s, gradient_bytes};
    m->alike[u] = u && !memcmp(m->last, added, sizeof added) ? m->alike[u - 1] : u;
    memcpy(m->last, added, sizeof added);
}
// Sets the seconds of a pass over unit u, the one added last, beside those of its samples. They are
// set for all units or for none.
static inline void plan_model_pass(PlanModel *m, int u, double forward_s, double backward_s,
                                   double weight_s) {
    const double added[] = {forward_s, backward_s};
    m->forward.pass[u + 1] = m->forward.pass[u] + forward_s;
    m->backward.pass[u + 1] = m->backward.pass[u] + backward_s;
    m->weight.pass[u + 1] = m->weight.pass[u] + weight_s;
    if (memcmp(m->last_pass, added, sizeof added)) { m->alike[u] = u; }
    memcpy(m->last_pass, added, sizeof added);
}
// Sets the weight part of unit u, the one added last: its seconds, and the bytes with which it
// waits.
static inline void plan_model_split(PlanModel *m, int u, double weight_s, double waiting_bytes) {
    m->weight.row[u + 1] = m->weight.row[u] + weight_s;
    m->waiting[u + 1] = m->waiting[u] + waiting_bytes;
}
// Sets what a sample keeps in unit u, the one added last: the bytes that recomputation leaves of
// its activations, and those of its input.
static inline void plan_model_keep(PlanModel *m, int u, double kept_bytes, double input_bytes) {
    m->kept[u + 1] = m->kept[u] + kept_bytes;
    m->inputs[u + 1] = m->inputs[u] + input_bytes;
    m->cut[u] = input_bytes;
}
// Returns the seconds of a micro-batch of `rows` samples in the units from `first` to the one
// before `end`.
static inline double unit_seconds(const UnitSeconds *s, int first, int end, double rows) {
    return rows * (s->row[end] - s->row[first]) + (s->pass[end] - s->pass[first]);
}
// Returns the same of both passes.
static inline double plan_units_seconds(const PlanModel *m, int first, int end, double rows) {
    return unit_seconds(&m->forward, first, end, rows) +
           unit_seconds(&m->backward, first, end, rows);
}

// A profile while it is read: nodes in the file's order, edges as pairs of their indices.
typedef struct {
    const char *file;
    Json json;
    int model, nodes, edges;
    double batch;
    int *value, *place; // [nodes] value in the JSON file; unit that the node becomes
    double *id;         // [nodes]
    int (*edge)[2];     // [edges] indices of two nodes
} ProfileReader;

__attribute__((noreturn, format(printf, 2, 3))) static inline void
profile_refuse(const ProfileReader *r, const char *format, ...) {
    char what[400];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    die(EXIT_INPUT,
        "--profile takes FILE or FILE:MODEL in the form of test/golden/dapple_profiles.json",
        "%s: %s", r->file, what);
}
// Returns a member of an object that must be a number from low to high.
static inline double profile_number(const ProfileReader *r, int object, const char *name,
                                    double low, double high) {
    int v = json_get(&r->json, object, name);
    if (!json_is(&r->json, v, JSON_NUMBER)) {
        profile_refuse(r, "\"%s\" is missing, or no number, at byte %zu", name,
                       (size_t)(r->json.values[object].text - r->json.text));
    }
    double x = r->json.values[v].number;
    if (!(x >= low && x <= high)) {
        profile_refuse(r, "\"%s\" must be from %g to %g, found %g", name, low, high, x);
    }
    return x;
}
// Returns the bytes of a node's outputs: "act_bytes" is a number, or a list with one for each
// tensor.
static inline double profile_outputs(const ProfileReader *r, int node) {
    const double most = 1e15;
    int list = json_get(&r->json, node, "act_bytes");
    double sum = 0;
    if (!json_is(&r->json, list, JSON_ARRAY)) {
        return profile_number(r, node, "act_bytes", 0, most);
    }
    for (int i = json_first(&r->json, list); i >= 0; i = json_next(&r->json, list, i)) {
        double x = json_is(&r->json, i, JSON_NUMBER) ? r->json.values[i].number : -1;
        if (!(x >= 0 && x <= most)) {
            profile_refuse(r, "\"act_bytes\" must be numbers from 0 to %g", most);
        }
        sum += x;
    }
    return sum;
}
static inline bool profile_is_input(const ProfileReader *r, int node) {
    int name = json_get(&r->json, node, "name");
    const JsonValue *v = &r->json.values[name];
    if (!json_is(&r->json, name, JSON_STRING)) { profile_refuse(r, "a node has no \"name\""); }
    return v->bytes >= 5 && !memcmp(v->text, "Input", 5);
}

// Returns the model of this name in the file; for an empty name, the only one.
static inline int profile_find_model(const ProfileReader *r, const char *name) {
    const Json *j = &r->json;
    int models = json_get(j, 0, "models"), count = json_members(j, models);
    if (!json_is(j, models, JSON_OBJECT) || !count) {
        profile_refuse(r, "there are no \"models\"");
    }
    int model = *name ? json_get(j, models, name) : count == 1 ? json_first(j, models) : -1;
    if (model >= 0) { return model; }
    char names[300] = "";
    for (int i = json_first(j, models), n = 0; i >= 0 && n < 200; i = json_next(j, models, i)) {
        n += snprintf(names + n, sizeof names - n, " %.*s",
                      (int)min_i64(j->values[i].name_bytes, 60), j->values[i].name);
    }
    profile_refuse(r, "%s%.60s%s; it has%s", *name ? "no model \"" : "which model? Give FILE:MODEL",
                   name, *name ? "\"" : "", names);
}
static inline int profile_node_of_id(const ProfileReader *r, double id) {
    for (int i = 0; i < r->nodes; i++) {
        if (r->id[i] == id) { return i; }
    }
    return -1;
}
static inline void profile_read_nodes(ProfileReader *r) {
    int list = json_get(&r->json, r->model, "nodes"), at = json_first(&r->json, list),
        count = json_members(&r->json, list);
    if (count < 1 || count > PLAN_UNITS) {
        profile_refuse(r, "from 1 to %d \"nodes\" are expected, found %d", PLAN_UNITS, count);
    }
    r->value = new_array(int, count * 2, "profile");
    r->place = r->value + count;
    r->id = new_array(double, count, "profile");
    for (; r->nodes < count; r->nodes++, at = json_next(&r->json, list, at)) {
        if (!json_is(&r->json, at, JSON_OBJECT)) {
            profile_refuse(r, "node %d of the list is no object", r->nodes + 1);
        }
        double id = profile_number(r, at, "id", 0, 1e9);
        if (profile_node_of_id(r, id) >= 0) { profile_refuse(r, "two nodes have the id %g", id); }
        r->value[r->nodes] = at;
        r->id[r->nodes] = id;
    }
}
static inline void profile_read_edges(ProfileReader *r) {
    const Json *j = &r->json;
    int list = json_get(j, r->model, "edges"), count = json_members(j, list),
        at = json_first(j, list);
    if (!json_is(j, list, JSON_ARRAY) || count > PLAN_EDGES) {
        profile_refuse(r, "a list of at most %d \"edges\" is expected", PLAN_EDGES);
    }
    r->edge = (int(*)[2])checked_calloc(count, sizeof(int[2]), "profile");
    for (; r->edges < count; r->edges++, at = json_next(j, list, at)) {
        int end = json_is(j, at, JSON_ARRAY) && json_members(j, at) == 2 ? json_first(j, at) : -1;
        for (int k = 0; k < 2; k++, end = end >= 0 ? json_next(j, at, end) : -1) {
            int node =
                json_is(j, end, JSON_NUMBER) ? profile_node_of_id(r, j->values[end].number) : -1;
            if (node < 0) { profile_refuse(r, "edge %d is no pair of ids of nodes", r->edges + 1); }
            r->edge[r->edges][k] = node;
        }
    }
}
// Orders the nodes as units: in the file's order if every edge goes forward in it. Otherwise the
// next unit is always the node with the least id among those whose inputs are ordered.
static inline void profile_order(ProfileReader *r) {
    bool forward = true;
    int *inputs = new_array(int, r->nodes, "profile");
    for (int e = 0; e < r->edges; e++) {
        forward = forward && r->edge[e][0] < r->edge[e][1], inputs[r->edge[e][1]]++;
    }
    for (int i = 0; i < r->nodes; i++) { r->place[i] = forward ? i : -1; }
    for (int n = 0; n < r->nodes && !forward; n++) {
        int next = -1;
        for (int i = 0; i < r->nodes; i++) {
            if (r->place[i] < 0 && !inputs[i] && (next < 0 || r->id[i] < r->id[next])) { next = i; }
        }
        if (next < 0) { profile_refuse(r, "its \"edges\" form a cycle"); }
        r->place[next] = n;
        for (int e = 0; e < r->edges; e++) { inputs[r->edge[e][1]] -= r->edge[e][0] == next; }
    }
    free(inputs);
}
// A node's outputs cross every border up to the last node that uses them.
static inline void profile_fill_cuts(const ProfileReader *r, const double *outputs, PlanModel *m) {
    int *last = new_array(int, r->nodes, "profile");
    for (int e = 0; e < r->edges; e++) {
        last[r->edge[e][0]] = max_i64(last[r->edge[e][0]], r->place[r->edge[e][1]]);
    }
    for (int i = 0; i < r->nodes; i++) {
        for (int u = r->place[i] + 1; u <= last[i]; u++) { m->cut[u] += outputs[i]; }
    }
    free(last);
}
static inline PlanModel profile_units(const ProfileReader *r) {
    PlanModel m = plan_model_make(r->nodes);
    double *outputs = new_array(double, r->nodes, "profile");
    int *node_at = new_array(int, r->nodes, "profile");
    for (int i = 0; i < r->nodes; i++) { node_at[r->place[i]] = i; }
    for (int u = 0; u < m.units; u++) {
        int node = r->value[node_at[u]];
        double scale = profile_is_input(r, node) ? 0 : 1, per_sample = scale / r->batch,
               seconds = 1e-3 * per_sample;
        double forward = profile_number(r, node, "fwd_ms", 0, 1e9),
               backward = profile_number(r, node, "bwd_ms", 0, 1e9);
        outputs[node_at[u]] = per_sample * profile_outputs(r, node);
        plan_model_add(&m, u, seconds * forward, seconds * backward, outputs[node_at[u]],
                       scale * profile_number(r, node, "param_bytes", 0, 1e15));
    }
    profile_fill_cuts(r, outputs, &m);
    free_all(outputs, node_at);
    if (!(m.forward.row[m.units] + m.backward.row[m.units] > 0)) {
        profile_refuse(r, "no node takes any time");
    }
    return m;
}

// Reads --profile FILE[:MODEL]:
//   {"models":{NAME:{"profile_batch_size":, "edges":[[from,to]],
//     "nodes":[{"id":,"name":,"fwd_ms":,"bwd_ms":,"act_bytes":,"param_bytes":}]}}}
// Times and activations are those of the whole batch. Ends the program (EXIT_INPUT) on any other
// text.
static inline PlanModel profile_load(const char *text) {
    char file[OPTION_TEXT_MAX + 1];
    // the name of a file may contain a colon
    const char *colon = access(text, F_OK) ? strrchr(text, ':') : NULL;
    snprintf(file, sizeof file, "%.*s", colon ? (int)(colon - text) : OPTION_TEXT_MAX, text);
    ProfileReader r = {};
    r.file = file;
    r.json = json_open("--profile takes FILE or FILE:MODEL", file);
    r.model = profile_find_model(&r, colon ? colon + 1 : "");
    if (!json_is(&r.json, r.model, JSON_OBJECT)) { profile_refuse(&r, "the model is no object"); }
    r.batch = profile_number(&r, r.model, "profile_batch_size", 1, 1e9);
    profile_read_nodes(&r);
    profile_read_edges(&r);
    profile_order(&r);
    PlanModel m = profile_units(&r);
    free_all(r.value, r.id, r.edge);
    json_free(&r.json);
    return m;
}

#endif
