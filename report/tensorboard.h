// tensorboard.h: event files for TensorBoard (--tensorboard FOLDER), written while the run goes on.
//
// A file is a list of records: length (8 bytes), its checksum, the record, its checksum. Checksums
// are CRC-32C, rotated and shifted by a constant. A record is an Event of TensorFlow's
// event.proto in the encoding of protocol buffers: fields in a row, each a tag (number * 8 + kind)
// and a value. Kinds: 0 variable length, 1 eight bytes, 2 a length and so many bytes, 5 four bytes.
// Each start of the program makes a file of its own, so that nothing is overwritten.
#ifndef TENSORBOARD_H
#define TENSORBOARD_H

#include "base/base.h"
#include "base/files.h"
#include "checkpoint/folders.h"

typedef struct {
    FILE *file; // NULL: none is written
    bool begun; // has an event
} EventFile;
// An Event, or a part of one, while it is put together.
typedef struct {
    unsigned char at[2048];
    size_t bytes;
} ProtoMessage;
enum { PROTO_VARINT = 0, PROTO_64 = 1, PROTO_BYTES = 2, PROTO_32 = 5 };
enum { EVENT_TIME = 1, EVENT_STEP = 2, EVENT_VERSION = 3, EVENT_SUMMARY = 5, EVENT_SESSION = 7 };

static inline uint32_t masked_crc32c(const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++) { crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0); }
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static inline void proto_add(ProtoMessage *m, const void *data, size_t bytes) {
    assert(m->bytes + bytes <= sizeof m->at);
    memcpy(m->at + m->bytes, data, bytes);
    m->bytes += bytes;
}
static inline void proto_add_varint(ProtoMessage *m, uint64_t n) {
    for (; n >= 128; n >>= 7) { m->at[m->bytes++] = (unsigned char)(n | 128); }
    m->at[m->bytes++] = (unsigned char)n;
}
static inline void proto_add_tag(ProtoMessage *m, int field, int kind) {
    proto_add_varint(m, (uint64_t)(field * 8 + kind));
}
static inline void proto_add_bytes(ProtoMessage *m, int field, const void *data, size_t bytes) {
    proto_add_tag(m, field, PROTO_BYTES);
    proto_add_varint(m, bytes);
    proto_add(m, data, bytes);
}
// Begins an event: its time and its step.
static inline ProtoMessage event_begin(int64_t step) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const double seconds =
        files_time ? (double)files_time : (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    ProtoMessage m = {};
    proto_add_tag(&m, EVENT_TIME, PROTO_64);
    proto_add(&m, &seconds, sizeof seconds);
    proto_add_tag(&m, EVENT_STEP, PROTO_VARINT);
    proto_add_varint(&m, (uint64_t)step);
    return m;
}
// Adds a value to a list of values. TensorBoard groups by what is before the slash.
static inline void values_add(ProtoMessage *values, const char *group, const char *name,
                              double value) {
    const float number = (float)value;
    ProtoMessage scalar = {};
    char tag[128];
    const int length = snprintf(tag, sizeof tag, "%s/%s", group, name);
    proto_add_bytes(&scalar, 1, tag, (size_t)length);
    proto_add_tag(&scalar, 2, PROTO_32);
    proto_add(&scalar, &number, sizeof number);
    proto_add_bytes(values, 1, scalar.at, scalar.bytes);
}
static inline bool event_flush(FILE *file) {
    const bool flushed = !fflush(file);
    file_hide_time(fileno(file));
    return flushed;
}
// Writes an event. Returns false if it cannot be written.
static inline bool event_write(FILE *file, const ProtoMessage *event) {
    const uint64_t length = event->bytes;
    const uint32_t check = masked_crc32c(&length, sizeof length),
                   end = masked_crc32c(event->at, event->bytes);
    return fwrite(&length, sizeof length, 1, file) == 1 &&
           fwrite(&check, sizeof check, 1, file) == 1 &&
           fwrite(event->at, 1, event->bytes, file) == event->bytes &&
           fwrite(&end, sizeof end, 1, file) == 1 && event_flush(file);
}
// Writes the values of a step. Before the first ones of a file comes an event that makes
// TensorBoard forget this step and later ones of older files: a resumed run repeats them.
static inline bool event_file_add(EventFile *to, int64_t step, const ProtoMessage *values) {
    static const unsigned char start[] = {1 * 8 + PROTO_VARINT, 1}; // status: START
    if (!to->begun) {
        ProtoMessage session = event_begin(step);
        proto_add_bytes(&session, EVENT_SESSION, start, sizeof start);
        to->begun = event_write(to->file, &session);
    }
    ProtoMessage event = event_begin(step);
    proto_add_bytes(&event, EVENT_SUMMARY, values->at, values->bytes);
    return event_write(to->file, &event);
}

// Opens a new file in the folder; "": none.
static inline EventFile event_file_open(const char *folder) {
    static const char version[] = "brain.Event:2";
    EventFile to = {};
    if (!*folder) { return to; }
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    const Text path = text_of("%s/events.out.tfevents.%010lld.%s.%d", folder, (long long)time(NULL),
                              host, (int)getpid());
    errno = folder_make(folder);
    if (!errno) { to.file = fopen(path.at, "wbx"); }
    ProtoMessage event = event_begin(0);
    proto_add_bytes(&event, EVENT_VERSION, version, sizeof version - 1);
    if (!to.file || !event_write(to.file, &event)) {
        die(EXIT_INPUT, "--tensorboard names a folder that can be written", "cannot write %s: %s",
            path.at, strerror(errno));
    }
    return to;
}

#endif
