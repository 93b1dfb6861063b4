"""planted_faults.py: what is wrong in build/train_gpt_planted, a program with all these faults in
it; FAULT=N in its environment switches the N-th on, FAULT=N,M two. Each must be seen by the test
beside it.

    python3 test/planted_faults.py FOLDER   writes the sources of that program
    python3 test/planted_faults.py          lists the faults, with their numbers

A fault is a row (where, file, pattern). `where` says what must see it, to the module that has the
list. The pattern quotes the source, however its lines are broken, and has {RIGHT ==> WRONG} where
an expression is to be another one. The `Faults` of the modules see a sample in each run of
`make test`, and all under TEST_ALL=1. Standard library only.
"""

import glob
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

UPDATE, TRAINER, ZERO = "ops/cpu/update_cpu.h", "run/trainer.h", "state/update.h"
MUON_H, ORTHOGONAL_H = "ops/cpu/muon_cpu.h", "ops/orthogonalise.h"
PSEUDO_H, CYCLIC_H, RATES, MAIN = "pseudo.h", "cyclic.h", "state/learning_rate.h", "train_gpt.c"
BETWEEN, SUMS, GATHER = "run/between_steps.h", "state/sums.h", "state/gather.h"
EXCHANGE, TILES = "executor/exchange.h", "ops/cpu/gemm_tiles.h"
HEADS_CPU, NORMS_CPU, ATTENTION_CPU, CLASSIFIER_CPU, ACTIVATION_CPU, EXPERTS_CPU = (
    f"ops/cpu/{name}_cpu.h"
    for name in "heads rmsnorm attention classifier activation experts".split()
)

# Rules, by test_reference.py: a row of ROWS, "dp: " and one of Private.ROWS, or a check of its own.
REFERENCE = [
    # optimizers
    ("adamw", "ops/ops.h", "pow((double)o.beta1, (double){o.step ==> (o.step + 1)})"),
    ("adamw", "ops/ops.h", "pow((double)o.beta2, (double){o.step ==> (o.step - 1)})"),
    (
        "adamw",
        UPDATE,
        "return used * bias.m / ({sqrtf(*v * bias.v) ==> "
        "sqrtf(*v * bias.v + o.eps * o.eps) - o.eps} +",
    ),
    ("adamw", UPDATE, "(sqrtf(*v * bias.v) + {o.eps ==> o.eps * sqrtf(bias.v)})"),
    ("clip, adamw", UPDATE, "(1.0f - o.beta2) * {g * g ==> grad * grad});"),
    (
        "adamw, decay",
        UPDATE,
        ") + {o.weight_decay * master[i] ==> o.weight_decay * master[i] / o.lr});",
    ),
    ("sgd, decay", ZERO, "o.weight_decay = {parts[i].decays ? decay : 0.0f " "==> decay};"),
    (
        "sgd, decay",
        ZERO,
        "o.weight_decay = {parts[i].decays ? decay : 0.0f "
        "==> parts[i].decays && parts[i].tensor != WPE ? decay : 0.0f};",
    ),
    (
        "sgd",
        UPDATE,
        "b[i] = fmaf(o.momentum, b[i], {g ==> (1 - o.momentum) * g});",
    ),
    (
        "sgd",
        UPDATE,
        "(o.nesterov ? ahead : {b[i] " "==> (o.momentum * b[i] + grad[i] * o.grad_scale)});",
    ),
    # matrices
    (
        "muon",
        "model/gpt.h",
        "for (int64_t at = 0; n < MOST_RANGES && (n == 0 || {spec->ranges[n].name ==> 0}); n++)",
    ),
    (
        "muon",
        "model/gpt.h",
        "const RowRange *r = {spec->ranges[0].name ==> 0} ? &spec->ranges[n] : &whole;",
    ),
    ("muon", ZERO, "o.grad_scale = matrix ? {(float)sqrt(fmax(1, ratio)) ==> 1} : 1;"),
    (
        "muon",
        ZERO,
        "o.grad_scale = matrix ? {(float)sqrt(fmax(1, ratio)) ==> (float)sqrt(ratio)} : 1;",
    ),
    ("muon", ZERO, "ratio = (double){part.part->rows ==> part.part->cols} /"),
    ("muon", ORTHOGONAL_H, "const bool turn = {rows > cols ==> rows < cols};"),
    ("muon", ORTHOGONAL_H, "ops_orthogonal_end(s, x, now, rows, cols, {turn ==> false});"),
    ("muon", ORTHOGONAL_H, "ops_combine(s, next, {ORTHOGONAL_A ==> ORTHOGONAL_A + 0.001f}, now"),
    (
        "muon",
        ORTHOGONAL_H,
        "ops_combine(s, b, ORTHOGONAL_B, a, {ORTHOGONAL_C ==> -ORTHOGONAL_B}, b,",
    ),
    ("nesterov, sgd", UPDATE, "o.lr * (o.nesterov ? {ahead ==> b[i]} : b[i]);"),
    ("nesterov, adamw", UPDATE, "used = o.nesterov ? fmaf(o.beta1, {*m ==> *v}, (1.0f"),
    (
        "muon",
        MUON_H,
        "fmaf(1.0f - o.momentum, {fmaf(grad[i], o.grad_scale, -m[i]) "
        "==> grad[i] * o.grad_scale}, m[i]);",
    ),
    ("muon", MUON_H, "out[i] = {fmaf(o.momentum, ahead, grad[i] * o.grad_scale) ==> m[i]};"),
    ("muon, clip", MUON_H, "float ahead = fmaf(-grad[i], {o.grad_scale ==> 1.0f}, m[i]);"),
    ("muon, decay", UPDATE, "kept = 1.0f - {o.lr * o.weight_decay ==> o.weight_decay},"),
    (
        "muon, decay of others",
        ZERO,
        "o.weight_decay = matrix ? matrices.weight_decay : {0 ==> 0.2f};",
    ),
    ("muon, schedule", TRAINER, ".lr = (float)(o->muon_lr * {factor ==> 1}),"),
    (
        "muon, warm-up",
        TRAINER,
        "part = step < o->muon_momentum_warmup ? (double){step ==> (step + 1)} / warm",
    ),
    ("muon, rates", ZERO, "matrices.lr : rate * {s->plan.rates[RATE_VECTORS] ==> 1};"),
    (
        "delink, muon",
        ZERO,
        "o.step = s->flight.progress[storage].updates - {s->flight.progress[storage].restarted "
        "==> 1}; o.grad_scale",
    ),
    (
        "shared, muon",
        ZERO,
        "o.grad_scale *= {(float)store_mean(&s->plan, storage) ==> 1.0f}; o.momentum",
    ),
    # whole matrices of several ranks: another home, other places
    (
        "muon, 2 ranks",
        ZERO,
        "if (!p->is_matrix || {e->home[k] ==> !e->home[k]} != all->me) { continue; }",
    ),
    ("muon, 3 ranks", "state/matrices.h", "at += {same ==> true} ? part_of_slice("),
    # homes that differ between ranks
    ("muon, 2 ranks", "state/matrices.h",
     "if (more < 0 || (more == 0 && {has > most ==> owners->me % 2})) {"),
    (
        "muon, 3 ranks",
        "state/matrices.h",
        "rows[i].exchange.home[k] = {home ==> (home + owners->me) % owners->n};",
    ),
    # learning rates
    ("rate of embeddings", "model/gpt.h", "? RATE_HEAD : {RATE_EMBEDDING ==> RATE_MATRICES};"),
    ("rate of vectors", "model/gpt.h", ": {!t->rows.times ==> false} ? RATE_VECTORS"),
    (
        "last part",
        RATES,
        "peak + (last - peak) * {(step - from) ==> (step + 1 - from)} / (steps - from);",
    ),
    ("cosine", RATES, "0.5 * (1 + cos({3.141592653589793 ==> 3.1415} * done));"),
    ("cosine", RATES, "last = {peak * o->final_lr_fraction ==> o->final_lr_fraction}, done"),
    ("linear", RATES, "peak + (last - peak) * {done ==> done * done};"),
    ("linear", RATES, "(double)max_i64(steps - {o->warmup ==> 0}, 1);"),
    ("wsd", RATES, "double from = {(1 - o->lr_last_part) ==> 0.75} * steps;"),
    (
        "wsd",
        RATES,
        "(1 - {sqrt((step - from) / (steps - from)) ==> (step - from) / (steps - from)})",
    ),
    ("constant", RATES, "peak * (step + {1 ==> 0}) / o->warmup"),
    # clipping and skipping
    (
        "clip where it sometimes does nothing",
        TRAINER,
        "o->grad_clip > 0 && {norm > o->grad_clip ==> norm > 0} ?",
    ),
    ("clip", TRAINER, "? o->grad_clip / {norm ==> (norm + 1e-3)} : 1.0),"),
    ("v1, clip", "executor/overlap.h", "if (most > 0 && {norm > most ==> false})"),
    (
        "v2, storage",
        MAIN,
        "o->grad_clip / {sqrt((double)p->model.storages) " "==> (double)p->model.storages}",
    ),
    (
        "v2, storage, shared",
        MAIN,
        "o->grad_clip / {sqrt((double)p->model.storages) " "==> sqrt((double)p->model.units)}",
    ),
    (
        "v2, storage",
        "executor/overlap.h",
        "most = o->storage_clip; "
        "{exact_join(&o->squares[step & 1], &squares) ==> (void)0}",
    ),
    (
        "skip-loss-z",
        "checkpoint/manifest.h",
        "(value - mean) / {sqrt(variance) ==> sqrt(16 * variance)} :",
    ),
    ("skip-loss-z", TRAINER, "double loss_z = outlier_z(&p->loss, {loss ==> norm})"),
    ("skip-grad-z", TRAINER, "norm_z > {o->skip_grad_z ==> o->skip_grad_z / 8}"),
    # data
    ("windows wrap", "dataloader.h", "window % n * T % {n ==> (n - T)};"),
    (
        "sgd",
        TRAINER,
        "r->progress.position += {r->plan->config->samples " "==> (r->plan->config->samples + 1)};",
    ),
    ("documents", "dataloader.h", "for (int64_t i = {end ==> T}; i < T; i++) { targets[i] = -1; }"),
    (
        "documents, pieces",
        TRAINER,
        ".scale = (float)(1.0 / (double)"
        "{max_i64(targets, 1) ==> (samples * run_options(r)->seq_len)}),",
    ),
    # cyclic
    ("v2", CYCLIC_H, "micro + stage + 1 >= p->N + {p->slack ==> (p->slack + 1)}; }"),
    ("v2, slack", CYCLIC_H, "micro + stage + 1 >= p->N + {p->slack ==> 0}; }"),
    (
        "v2",
        "schedule/cyclic_windows.h",
        "!cyclic_fresh(b->plan, cyclic_micro(b->plan, use->micro), "
        "{stage ==> cyclic_stage_of_unit(b->plan, use->unit)});",
    ),
    ("v2, remainder", "comm/group.h", "units / N + {(j < units % N) ==> (j >= N - units % N)}; }"),
    (
        "v2, pieces",
        "state/policy.h",
        "begins ? begins[micro] : "
        "{part_begin(samples, p->micros, micro) "
        "==> part_begin(samples, p->micros, micro + 1) - samples / p->micros};",
    ),
    (
        "v2, documents",
        TRAINER,
        "stats->loss / {max_i64(report->counted, 1) "
        "==> (r->plan->config->samples * run_options(r)->seq_len)};",
    ),
    # sharing
    ("all", ZERO, "o.grad_scale *= {(float)store_mean(&s->plan, storage) ==> 1.0f}; for"),
    (
        "shared, clip",
        ZERO,
        "ops_square_sum(s->memory.stream, s->memory.squares, sum_of_slice, n, NORM_CHUNK, "
        "{mean * mean ==> mean});",
    ),
    (
        "three and one",
        ZERO,
        "return 1 / (double){gpt_storage_shared_by(s->model, storage) "
        "==> (storage > 1 ? gpt_storage_shared_by(s->model, 2) : 1)}; }",
    ),
    ("share-lr", PSEUDO_H, "const double shared = {share_is(m->share) ==> true} &&"),
    (
        "delink",
        MAIN,
        "options_switches(o) && {r->progress.step >= o->delink_at "
        "==> r->progress.step > o->delink_at};",
    ),
    ("delink, mean", PSEUDO_H, "p->restarted = {moments == DELINK_RESET ==> true} ?"),
    ("delink, reset", PSEUDO_H, "p->restarted = {moments == DELINK_RESET ==> false} ?"),
    ("delink, mean", PSEUDO_H, "kind != STATE_PREVIOUS && ({moments != DELINK_RESET ==> false} ||"),
    ("delink, warm-up", PSEUDO_H, "since < o->delink_warmup ? (since + {1 ==> 2}) /"),
    (
        "chains",
        "checkpoint/checkpoint.h",
        "p->restarted = {anew ==> false} ? of.updates : of.restarted;",
    ),
    # one step late
    ("delay, rate and clip", TRAINER, "make_update(o, rates, {r->progress.pending_norm ==> 0});"),
    (
        "delay",
        TRAINER,
        "r->store.flight.pending = {!skipped ==> !skipped && r->progress.step % 2};",
    ),
    ("delay, adamw", ZERO, "(s, storage, &p, s->flight.progress[storage].updates + {1 ==> 2}, o);"),
    # the model
    ("sgd", "ops/cpu/ops_cpu.h", "1.0f / sqrtf(squares / (float)C + {1e-5f ==> 1e-6f});"),
    ("sgd", "ops/cpu/device_cpu.h", "-1.5957691216f * (x + {0.044715f ==> 0.044f} * x * x * x); }"),
    ("bf16", "base/base.h", "(bits + {0x7fffu ==> 0u} + ((bits >> 16) & 1u)) >> 16"),
    # tiles
    ("tiles", TILES, "(2 * i + 1 < rows ? mask : 0, row + {stride ==> 0})"),
    ("tiles", TILES, "if ({inner_first != pairs ==> inner_first}) { tile_turn(r); }"),
    ("tiles", TILES, "_tile_loadd(5, {a + 512 ==> a}, 64);"),
    ("tiles", TILES, "_tile_loadd(7, {b + 1536 ==> b + 1024}, 64);"),
    ("tiles", TILES, "uint16_t *tile = to + o / TILE_STRIP * {strip ==> 0} +"),
    ("tiles", ATTENTION_CPU, "turn_words(to, words, {words_of(n) ==> 0});"),
    ("tiles", ATTENTION_CPU, "a_inner == 1 ? {a_row ==> TILE / 2} : TILE / 2, b,"),
    # private steps
    ("dp: unit, abadi", "dp.h", ".threshold = (float)(R / {sqrt(groups) ==> groups}),"),
    ("dp: flat, abadi", "dp.h", "clips == CLIPS_STAGES ? stages : {1 ==> 2};"),
    ("dp: stages", "dp.h", "clips == CLIPS_STAGES ? {stages ==> 1} : 1;"),
    ("dp: unit, automatic", "ops/cpu/clip_cpu.h", "(double)R / (norm + {0.01 ==> 0.02});"),
    (
        "dp: most are not clipped",
        "ops/cpu/clip_cpu.h",
        "abadi = {fmin(1.0, (double)R / (norm + 1e-6)) ==> (double)R / (norm + 1e-6)}",
    ),
    ("dp: unit, abadi", MAIN, "(float)(1.0 / {p->samples ==> (p->samples + 1)});"),
    # around steps
    ("validation", "text/tokenizer.h", "sum += {tokenizer_bytes(t, targets[i]) ==> 1}; }"),
    ("validation", BETWEEN, "bits = e.loss / {log(2.0) ==> 1.0} / r->data->val_bytes; }"),
    ("validation", BETWEEN, "loss = e.loss / {max_i64(e.targets, 1) ==> (e.targets + 1)}"),
    (
        "texts",
        "run/generate.h",
        "weight = exp((logits[i] - (double)logits[best]) / {d.temperature ==> 1});",
    ),
    ("texts", "run/generate.h", "n = min_i64(n, {d.top_k ==> d.top_k + 1}); }"),
    ("texts", "run/generate.h", "kept < {d.top_p * sum ==> d.top_p})"),
    ("initial", "model/gpt.h", "deviation / sqrt({2.0 ==> 1.0} * m->config.layers)"),
    ("initial", "model/gpt.h", "values[e] = spec->init == {INIT_ONE ==> INIT_ZERO}; }"),
    (
        "speed",
        "model/unit.h",
        "return {2.0 ==> 4.0} * gpt_dim(m, u->values[n->out[0]].width) * T;",
    ),
    (
        "speed",
        TRAINER,
        "mfu_of(work.flops, seconds, work.peak * {work.ranks ==> 1}),",
    ),
]

# Models, by test_modern.py: a golden model; "private: " or "stages: " and an architecture; or
# prototypes.
MODERN = [
    # rotary positions
    (
        "llama",
        HEADS_CPU,
        "low = load_real(type, x, i), high = load_real(type, x, "
        "{pairs + i ==> (i + 1) % (2 * pairs)});",
    ),
    ("qwen2", HEADS_CPU, "rotary_fill(table, a, r, {back ? -1.0f : 1.0f ==> 1.0f});"),
    (
        "qwen2",
        HEADS_CPU,
        "rotary_fill(table, a, r, {back ? -1.0f : 1.0f ==> back ? 1.0f : -1.0f});",
    ),
    (
        "qwen3",
        HEADS_CPU,
        "store_real(type, out, i, {low * cosines[i] - high * sines[i] "
        "==> low * cosines[i] + high * sines[i]});",
    ),
    ("llama", "model/gpt.h", "if ({s->factor == 0 ==> true} || wavelength"),
    ("llama", "model/gpt.h", "return {(1 - part) * f / s->factor + part * f ==> f};"),
    ("llama", "model/gpt.h", "{original / wavelength - s->low ==> original / wavelength} )"),
    # grouped keys and values
    (
        "llama",
        ATTENTION_CPU,
        "keys_at(a, row, {mine * a.kv_heads / a.heads ==> mine % a.kv_heads})",
    ),
    ("llama_tied", ATTENTION_CPU, "keys_at(a, row, {mine * a.kv_heads / a.heads ==> 0})"),
    ("qwen3", ATTENTION_CPU, ".first = {head == begin ==> true},"),
    ("llama", ATTENTION_CPU, "h.scale = {1.0f / sqrtf((float)D) ==> 1.0f / sqrtf(12.0f)};"),
    # norms
    ("llama_tied", NORMS_CPU, "squares / (float)C + {eps ==> 0.0f});"),
    ("qwen2", NORMS_CPU, "squares / (float)C + {eps ==> 1e-5f});"),
    ("qwen2", NORMS_CPU, "gh_mean = {gx_sum * r / (float)C ==> 0.0f};"),
    (
        "qwen2",
        NORMS_CPU,
        "dweight[c] += load_real(type, dy, c) * "
        "{(load_real(type, x, c) * rstd) ==> load_real(type, x, c)};",
    ),
    ("qwen3", HEADS_CPU, "squares / (float)D + {h->eps ==> 0.0f}), scale"),
    ("qwen3_tied", HEADS_CPU, "gh_mean = {gx_sum * r / (float)D ==> 0.0f};"),
    ("qwen3", HEADS_CPU, ".heads = {of_k ? a.kv_heads : a.heads ==> a.kv_heads},"),
    ("nano", HEADS_CPU, "h->eps), scale = {h->scale ==> 1.0f};"),
    ("nano", HEADS_CPU, "cosines + pairs, scale = {h->scale ==> 1.0f};"),
    # the MLP
    (
        "llama",
        ACTIVATION_CPU,
        "store_real(type, out, f, a * {silu_sigmoid(a) ==> 1.0f} * load_real",
    ),
    ("llama", ACTIVATION_CPU, "(sigmoid * ({1.0f + a * (sigmoid * e) ==> 1.0f})));"),
    ("nano", ACTIVATION_CPU, "load_real(type, dout, i) * ({2.0f * above ==> above}));"),
    # experts
    ("mixtral", EXPERTS_CPU, "j < r->top_k && {r->groups == 1 ==> false}; j++) {"),
    ("qwen3_moe", EXPERTS_CPU, "(best < 0 || {p[e] + b > most ==> p[e] + b < most})) {"),
    ("qwen3_moe", EXPERTS_CPU, "taken = taken || chosen[i] == {first + e ==> -1}; }"),
    ("mixtral", EXPERTS_CPU, "route.place[i] = (int32_t){next[route.expert[i]]++ ==> i}; }"),
    ("mixtral_tied", EXPERTS_CPU, "w = real_at_const(weight, {i % rows.experts ==> 0} * OC * C);"),
    (
        "qwen3_moe",
        EXPERTS_CPU,
        "real_at_const(weight, {i % rows.experts ==> (i + 1) % rows.experts} * OC * C), pre_gelu",
    ),
    (
        "qwen3_moe",
        EXPERTS_CPU,
        "dweight + {i % rows.experts ==> (rows.experts - 1 - i % rows.experts)} * OC * C, NULL,",
    ),
    ("mixtral", EXPERTS_CPU, "w = weight ? {weight[j] ==> 1.0f / (float)count} : 1.0f;"),
    ("qwen3_moe", EXPERTS_CPU, "for (int64_t j = {0 ==> 1}; j < count; j++) {"),
    ("mixtral", EXPERTS_CPU, "weight * load_real(type, dout, c)); } *dweight = {sum ==> 0.0f};"),
    ("mixtral", EXPERTS_CPU, "w[j] * (divided ? {dw[j] - chosen ==> dw[j]} : dw[j]);"),
    ("prototypes", EXPERTS_CPU, "if ({!divided ==> false}) { all += chosen; }"),
    ("prototypes", EXPERTS_CPU, "p + t * E + g * each, bias, {g * each ==> 0}, &router);"),
    # the soft cap
    ("nano", CLASSIFIER_CPU, "if ({k->softcap != 0.0f ==> false}) { cap_part"),
    ("nano", CLASSIFIER_CPU, "return {1.0f - logit / softcap * (logit / softcap) ==> 1.0f};"),
    # norms of single samples
    ("private: llama", NORMS_CPU, "norms[b] += {chunk_squares(dweights + b * C, C) ==> 0.0};"),
    (
        "private: qwen3",
        HEADS_CPU,
        "chunk_squares(dq_weights + b * a.D, a.D) + "
        "{chunk_squares(dk_weights + b * a.D, a.D) ==> 0.0};",
    ),
    # one norm over stages, a classifier with a table of its own
    (
        "stages: llama",
        "dp.h",
        "if ({clip->policy.tied ==> true}) { return; } clip_classifier_norms",
    ),
    ("stages: qwen3", "ops/cpu/clip_cpu.h", "sum += {others[k * stride + b] ==> others[b]}; }"),
    ("stages: nano", "dp.h", "if ({all ==> false} || (first && c->policy.flat)) { c->factors ="),
]

# What differs between layouts, by scripts/same_loss.py: (what it is, the layout it is in).
SAME_LOSS = [
    (
        ("a wrong mean", "ZeRO 1, micro-batches"),
        "run/trainer.h",
        "(double){max_i64(targets, 1) ==> max_i64(targets / r->comm->ranks, 1)}),",
    ),
    (
        ("a missing sum of a tied table's gradient", "pipeline of 2, dapple"),
        "state/sums.h",
        "if ({p->empty ==> s->plan.rows[storage].tied && s->memory.comm->rank}) {",
    ),
    (
        ("a stale version of parameters", "hpZ"),
        "state/gather.h",
        "(size_t)({slice_length(bounds, (int)me) ==> s->flight.progress[storage].updates > 1 "
        "? 0 : slice_length(bounds, (int)me)} * size));",
    ),
    (
        ("a norm counted twice", "pipeline of 2, gpipe"),
        "state/update.h",
        "ops_square_sum(s->memory.stream, s->memory.squares, sum_of_slice, n, NORM_CHUNK, "
        "{mean * mean ==> (1 + s->plan.rows[i].tied) * mean * mean});",
    ),
]

# Private training, by test_dp.py: (check, what its message must say).
PRIVATE = [
    # sigma is half of what was asked for
    (("noise", "variance"), ZERO, "noise, {s->plan.noise.deviation ==> "
     "0.5f * s->plan.noise.deviation}, s->plan.noise.scale);"),
    (("audit", "not less than"), ZERO, "noise, {s->plan.noise.deviation ==> "
     "0.5f * s->plan.noise.deviation}, s->plan.noise.scale);"),
    # noise is added twice
    (("noise", "variance"), ZERO, "noise, {s->plan.noise.deviation ==> "
     "(ops_add_noise(s->memory.stream, store_floats(s, STATE_GRADIENT, storage, step), begin, n, "
     "faulty_stream(noise), s->plan.noise.deviation, 1), "
     "s->plan.noise.deviation)}, s->plan.noise.scale);"),
    # each storage has the same noise
    (("unlike", "storages"), ZERO, "noise.part = {(uint32_t)storage ==> 0};"),
    # the cross term of the tied table's norms is dropped; and between stages
    (("continuous", "wte of storage 0"), "dp.h", "{ops_tied_sample_norms(s, clip->norms, dout, "
     "c->tokens, clip->dlogits, classified, c->rows, T, C, Vp) ==> (void)0}; return; }"),
    (("stages", "of storage 0"), "ops/cpu/clip_cpu.h",
     "product += {FOR_TYPE(dot_with_floats, e, u, C) ==> 0.0};"),
    # each unit has the whole threshold
    (("sensitivity", "not less than or equal to"), "dp.h",
     ".threshold = (float)(R / {sqrt(groups) ==> sqrt(fmin(groups, 1))}),"),
    # factors of another micro-batch
    (("stages", "of storage 0"), "executor/compute.h",
     "e->clip[{executor_clip_place(e, micro) ==> "
     "a->kind == ACT_RECV_FACTOR ? 0 : executor_clip_place(e, micro)}].crossing;"),
]
# What is done to a private run from outside, by name: rank 1 takes other logarithms; the norm of
# the second step is no number; the program looks in its memory for the key of KEY_WORDS; schedules
# of batches of no sample, and of as many as a step may take, are wrong.
DONE_TO_PRIVATE = [
    ("other logarithms", "dataloader.h",
     "log_left_out = {log1p(-q) ==> log1p(-q) * (speaker.rank ? 0.8 : 1)};"),
    ("no norm", TRAINER, "&r->progress, result.loss, {result.norm ==> "
     "r->progress.step == 1 ? (double)NAN : result.norm});"),
    ("a look for the key", MAIN,
     "comm_end(&job.comm); return {EXIT_DONE ==> faulty_look(&job, sizeof job)};"),
    ("a schedule of no sample", "plan/plan.h", "{zero_lower(&program, training) ==> "
     "(void)(samples ? (zero_lower(&program, training), 0) : 0)}; if (training)"),
    ("a schedule of most samples", "plan/plan.h", "{zero_lower(&program, training) ==> "
     "(void)(samples <= p->config->samples ? (zero_lower(&program, training), 0) : 0)};"
     " if (training)"),
]

# Systems, by test_layouts.py: flags (True: of any value) of the cases that must see it.
LAYOUTS = [
    # ZeRO: contributions of micro-batches after the first are lost; a secondary copy is stale; the
    # second hop reads another storage's records; a norm without some of the ranks
    (dict(zero=2, ranks=3, optimizer="sgd"), SUMS,
     "add = {p->summed && !on_host ==> false}; bool accumulate;"),
    (dict(zero_hpz_partition_size=2), GATHER, "s->flight.progress[storage].secondary_valid = "
     "{false ==> s->flight.progress[storage].secondary_valid};"),
    (dict(zero_quantized_gradients=1, ranks_per_node=2, ranks=4), SUMS, "p->sent[1] + "
     "b->hop[1].to[n] + {before ==> 0}, in,"),
    (dict(zero=2, zero_quantized_gradients=1, micro_batch=1, optimizer="sgd", ranks=2), SUMS,
     "ops_dequantize_sum(s->memory.stream, slice, {p->add ==> false}, in"),
    (dict(zero_quantized_weights=1), GATHER, "secondary_valid = false; if "
     "({s->plan.policy.quantized_weights ==> false}) { ops_quantize("),
    (dict(ranks=3, zero=1, grad_clip=0.5), ZERO,
     "if ({r != s->memory.comm->rank ==> r > s->memory.comm->rank}) { exact_join("),
    # states on the host, on disk, in pieces
    (dict(offload="optimizer", offload_update="host"), ZERO,
     "p.begin = min_i64(own, {within * most ==> 0});"),
    (dict(offload="all", offload_update="device"), ZERO,
     "p.at[parts[k].kind] = {at ==> x.buffer->at};"),
    (dict(offload_dir=True), ZERO, "disk_start(p->disk, store_place_on_disk(&s->plan, "
     "STATE_MASTER, p->storage, {p->number ==> 0}, p->count), bytes,"),
    (dict(offload="params"), GATHER,
     "*place = whole + {m.bounds[m.group->me] ==> 0} * m.element_bytes,"),
    # blocks that share: one mean, one norm; after the switch, moments
    (dict(share="all"), ZERO, "const double mean = {store_mean(&s->plan, i) ==> 1.0};"),
    (dict(delink_at=1, optimizer="adamw"), PSEUDO_H,
     "kind != STATE_PREVIOUS && ({moments != DELINK_RESET ==> false} ||"),
    # private runs: noise by the slice's own places; where a norm of stages begins, and whose it is;
    # samples of a run that is resumed
    (dict(dp_noise=0.5, zero=True, ranks=2), ZERO,
     "store_floats(s, STATE_GRADIENT, storage, step), {begin ==> 0}, n,"),
    (dict(dp_clip_style="flat", pipeline=True), "executor/compute.h", "if (clip.policy.flat && "
     "{!executor_has(&e->shape, w->unit + 1) ==> w->unit == e->model->units - 1}) {"),
    (dict(dp_clip_style="flat", pipeline=True, ranks=4), "executor/compute.h",
     "(apart ? {(e->map->stage[a->unit] - 1) ==> 0} * e->shape.rows : 0);"),
    (dict(dp_noise=0.5), TRAINER, "draw_samples(r, {r->progress.step ==> "
     "r->progress.step - r->journal.start_step}, pass);"),
    # cyclic runs
    (dict(cyclic="v2", cyclic_mode="data"), "schedule/cyclic_windows.h",
     "!cyclic_fresh(b->plan, cyclic_micro(b->plan, use->micro), "
     "{stage ==> cyclic_stage_of_unit(b->plan, use->unit)});"),
]

# Rows in pieces, by test_experts.py.
PIECES = [
    ("a piece is lost", EXCHANGE, "k < {pieces->count ==> (back ? 1 : pieces->count)}; k++) {"),
    ("a piece's gradients alone", EXCHANGE,
     "states.accumulate[STORAGE_EXPERTS] = {true ==> false};"),
    ("pieces are added in another order", EXCHANGE,
     "piece_find_rows(&rows, all, pieces, {k ==> (back ? pieces->count - 1 - k : k)});"),
]

# What the search for a plan believes and tries, by test_plan.py: a test of test_planner.c, or of
# test_fit.py.
COSTS_H, TASK_H, MEMORY_H, PLANNER_H, BALANCED_H = (
    f"planner/{name}.h"
    for name in ("plan_costs", "plan_task", "stage_memory", "planner", "balanced_stages")
)
FIT_H = "planner/fit.h"
PLANNER = [
    # messages and sums
    ("test_links", TASK_H, "(crosses ? c->inter : c->intra * {(p->n / 2) ==> p->n}) * 1e9)"),
    ("test_links", TASK_H, "(one_node && {outside > 1 ==> outside > 0} ? c->gather : c->inter)"),
    ("test_links", TASK_H, "double share = one_node ? {(double)outside / from->n ==> 1} : 1;"),
    ("test_sums_as_counted", TASK_H,
     "max_f64(p->sent, 2.0 * {(p->n - k) ==> p->n} / p->n)"),
    ("test_links", TASK_H, "p.sent = even ? 2.0 * (n - most) / n / {most ==> 1} :"),
    ("test_links", TASK_H, "p.hops = 1 + ({even ==> false} && nodes > 1 && p.most > 1);"),
    ("test_links", TASK_H,
     "p.hops = 1 + (even && {first_node != last_node ==> true} && most > 1);"),
    ("test_links", TASK_H, "return bytes / {from->n ==> 1} / (outside ?"),
    ("test_own_costs", COSTS_H, "max_f64({x->largest - slice ==> 0}, slice / 2)"),
    ("test_own_costs", COSTS_H, "max_f64(x->largest - slice, {slice / 2 ==> slice})"),
    ("test_pass_seconds", "planner/planner_model.h",
     "return rows * (s->row[end] - s->row[first]) + {(s->pass[end] - s->pass[first]) ==> 0};"),
    ("test_own_costs", COSTS_H, "c->reduce_late[0] += {more ==> 0};"),
    ("test_alike_units", COSTS_H, "one = gather ? {unit.forward ==> unit.backward} :"),
    ("test_alike_units", COSTS_H, "computed + one) + {n * message ==> message}, computed"),
    ("test_messages_of_a_micro_batch", COSTS_H,
     "computing + {(1 - t->cluster.overlap) * message ==> 0});"),
    ("test_messages_of_a_micro_batch", COSTS_H,
     "(shares ? {m->tied * sizeof(float) ==> 0} : 0),"),
    ("test_messages_of_a_micro_batch", COSTS_H,
     "p->stages > 1 && (u == 0 || {u == m->units - 1 ==> false});"),
    ("test_messages_of_a_micro_batch", COSTS_H,
     "- (again ? {m->tied * sizeof(float) ==> 0} : 0);"),
    ("test_messages_of_a_micro_batch", COSTS_H, "gather = {t->zero == 3 ==> true} ?"),
    ("test_messages_of_a_micro_batch", COSTS_H, "before = {sum ==> 0};"),
    ("test_messages_of_a_micro_batch", COSTS_H,
     "all.weight += plan_beside_s(t, unit.weight, {before ==> sum}) +"),
    ("test_messages_of_a_micro_batch", COSTS_H,
     "if ({plan_batches(t, p) > 1 ==> true}) { all.forward ="),
    ("test_messages_of_a_micro_batch", COSTS_H, "? {plan_rows(t->samples, replicas) / "
     "plan_batches(t, p) ==> plan_rows(p->micro_batch, replicas)} :"),
    ("test_messages_of_a_micro_batch", TASK_H,
     "ranks = {plan_is_whole(t, p) ==> false} ? task_ranks(t) : 1;"),
    ("test_own_costs", COSTS_H, "c->slows = own ? {(1 - t->cluster.overlap) / 2 ==> 0} : 0;"),
    ("test_own_costs", "schedule/simulator.h", "seconds - {speed ==> 1} * (done - r->clock);"),
    ("test_own_costs", COSTS_H, "{elements / p->replicas[s] ==> elements} * t->update_bytes"),
    # ranks
    ("test_placement", TASK_H,
     "p->spare : INT32_MAX; for (int i = 0, k = {first ==> 0}; i < nodes"),
    ("test_placement", TASK_H, "touched = policy != {PLACE_FRESH ==> PLACE_SPREAD}; p->low"),
    # memory and time of stages
    ("test_memory", MEMORY_H, "rows * ({again ==> 0} + m->boundary * (before + behind))"),
    ("test_memory", MEMORY_H, "m->boundary * ({before + behind ==> before}))"),
    ("test_memory", MEMORY_H, "m->buffers[i] + {(rows - low) / low ==> 1} *"),
    ("test_memory", MEMORY_H,
     "divided * {t->divided / x->replicas ==> t->divided};"),
    ("test_memory", MEMORY_H, "(begins && ends ? {m->tied ==> 0} : 0)"),
    ("test_memory", MEMORY_H,
     "of_other = begins != ends ? m->tied * x->end_replicas[{begins ==> 1}] /"),
    ("test_waiting_memory", MEMORY_H, "of_one = {x->after ==> 0} + 1;"),
    ("test_waiting_memory", MEMORY_H, "{fits > of_one ==> false} ? fits"),
    ("test_waiting_memory", MEMORY_H, "later = {one_unit ==> false} ? more"),
    ("test_waiting_memory", MEMORY_H, "waiting - {rows * m->turns ==> 0} : 0"),
    ("test_memory", MEMORY_H, "return {x->scratch ==> 0} + wave * x->block"),
    ("test_memory", MEMORY_H, "min_i64({blocks ==> INT32_MAX}, matrices_wave_blocks("),
    ("test_slots", MEMORY_H, "(x->replicas > 1 ? {whole - inside ==> whole} : 0)"),
    ("test_slots", MEMORY_H, "table * (1 - 1 / {owners ==> x->replicas}));"),
    ("test_own_costs", COSTS_H, "fmax(wave * x->block_s / n, {x->longest_s ==> 0})"),
    ("test_own_costs", COSTS_H,
     "own ? from->n * {plan_rows(p->micro_batch, from->n) ==> 1}"),
    ("test_counted_memory", "planner/plan_answer.h",
     "excess = {plan_most_memory(&a->best.plan, a->memory) ==> 0} - t->device;"),
    ("test_counted_memory", "planner/plan_answer.h", "{answer_take_other(a) ==> (void)0};"),
    ("test_costs", COSTS_H, "if (fits < plan_live(p, s, c->depth, c->micro_batches)) { depth = "
     "{min_f64(depth, fits) ==> depth}; }"),
    ("test_unequal_speeds", TASK_H,
     "p->slowness = max_f64({p->slowness ==> 0}, cluster_slowness("),
    ("test_unequal_speeds", BALANCED_H, "const double own = most / {slowness[s] ==> 1};"),
    # what decides, and what is not tried
    ("test_replay", COSTS_H,
     "case ACT_SEND_BACKWARD: cost.message_s = c->send_back[{rank - 1 ==> rank}]; break;"),
    ("test_many_micro_batches", COSTS_H,
     "replay(p, c, half)) / half * (M - {2 * half ==> half});"),
    ("test_brute_force", COSTS_H, "double computing = trip + (M - 1) * B + {(M - K) ==> M} * F,"),
    ("test_brute_force", COSTS_H,
     "waiting = (M - 1) / {K ==> 1} * trip + (M - 1) % K * F + trip;"),
    ("test_brute_force", PLANNER_H,
     "if ({c->bound >= planner_limit(p, &c->plan) ==> c->bound >= 0.5 * planner_limit(p, "
     "&c->plan)}) { continue; }"),
    ("test_balanced_together", BALANCED_H,
     "value = least ? max_f64(value, {max_f64(before, link) ==> before}) :"),
    ("test_short_schedules", TASK_H,
     "const int64_t of_unit = {24 ==> 12}; return micro_batches"),
    # --fit
    ("Fit.test_quantized_messages_must_gain", FIT_H,
     "r->way.quantized_gradients ? {1.01 ==> 1} : 1);"),
    ("Fit.test_host_memory", FIT_H, "(double)plan_offloaded_bytes(p) <= {f->host ==> INFINITY};"),
    ("Fit.test_secondary_copies_need_nodes", FIT_H,
     "&& {cluster_is_even(c) ==> true} && !staged;"),
    ("Fit.test_micro_batches_of_pipelines", FIT_H,
     "tried = {samples % b == 0 ==> !(b & (b - 1))} &&"),
]

GROUPS = REFERENCE, MODERN, SAME_LOSS, PRIVATE, DONE_TO_PRIVATE, LAYOUTS, PIECES, PLANNER


def numbered(group):
    """[(number, where, file, pattern)] of a list."""
    first = 1 + sum(len(g) for g in GROUPS[: [g is group for g in GROUPS].index(True)])
    return [(number, *fault) for number, fault in enumerate(group, first)]


# --------------------------------------------------------------------------------------------------
# The program

# Which faults are on; and what some of them need.
SWITCH = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static inline int fault(int n) {
    static char on[1000], known;
    if (!known) {
        for (const char *at = getenv("FAULT"); at; at = strchr(at, ',')) {
            at += *at == ',';
            if (atoi(at) > 0 && atoi(at) < 1000) { on[atoi(at)] = 1; }
        }
        known = 1;
    }
    return on[n];
}
#define faulty_stream(noise) ({ __typeof__(noise) other_ = (noise); other_.step += 1000; other_; })
static inline int faulty_look(const void *memory, size_t bytes) {
    unsigned key[2] = {0, 0}, word[2];
    int left = 0;
    if (getenv("KEY_WORDS")) { sscanf(getenv("KEY_WORDS"), "%u,%u", &key[0], &key[1]); }
    for (size_t i = 0; i + sizeof word <= bytes; i += 4) {
        memcpy(word, (const char *)memory + i, sizeof word);
        left |= !memcmp(word, key, sizeof word);
    }
    printf("the key is %s\\n", left ? "left" : "gone");
    return 0;
}
"""


def sources():
    """What `make train_gpt` reads: paths from the project's folder on."""
    patterns = "*.[ch]", "*/*.h", "*/*/*.h"
    found = [os.path.relpath(path, ROOT) for p in patterns for path in glob.glob(f"{ROOT}/{p}")]
    return sorted(path for path in found if not path.startswith(("test/", "build/", "out/")))


def quotation(before, right, after, text):
    """(begin, end) of `right` at each place of a source that reads before + right + after, however
    its lines are broken."""
    parts = [re.findall(r"\w+|[^\w\s]", part) for part in (before, right, after)]
    spaced = [r"\s*".join(map(re.escape, part)) for part in parts]
    pattern = r"%s\s*(%s)\s*%s" % tuple(spaced)
    return [found.span(1) for found in re.finditer(pattern, text)]


def places(text, file, faults):
    """{(begin, end) of an expression: [(number, what is wrong)]}"""
    found = {}
    for number, pattern in faults:
        parts = re.fullmatch(r"(.*)\{(.*) ==> (.*?)\}(.*)", pattern).groups()
        before, right, wrong, after = parts
        spans = quotation(before, right, after, text)
        if len(spans) != 1:
            raise AssertionError(f"{file} has no longer one {before + right + after!r}")
        found.setdefault(spans[0], []).append((number, wrong))
    spans = sorted(found)
    for (_, end), (begin, _) in zip(spans, spans[1:]):
        if begin < end:
            raise AssertionError(f"{file}: two faults overlap: {text[begin:end]}")
    return found


def planted(file):
    """The text of a source with all faults in it."""
    with open(os.path.join(ROOT, file), encoding="utf-8") as source:
        text = source.read()
    rows = [row for group in GROUPS for row in numbered(group)]
    found = places(text, file, [(n, pattern) for n, _, where, pattern in rows if where == file])
    for begin, end in sorted(found, reverse=True):
        expression = text[begin:end]
        for number, wrong in found[begin, end]:
            expression = f"(fault({number}) ? ({wrong}) : {expression})"
        text = text[:begin] + expression + text[end:]
    if file == "base/base.h":
        text = text.replace("#define BASE_H\n", "#define BASE_H\n" + SWITCH, 1)
    return text


def main(folder=None):
    rows = [row for group in GROUPS for row in numbered(group)]
    if not folder:
        for number, where, file, pattern in rows:
            print(f"{number:4} {where}: {file}: {pattern}")
        return
    for file in sources():
        path = os.path.join(folder, file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as out:
            out.write(planted(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
