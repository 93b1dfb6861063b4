// report.js: draws the figures of a page that report.py made, as SVG. Dragging over a figure zooms,
// a double-click shows all of it; a click on a name above it hides what has this name, a
// double-click everything else.
//
// A figure is {id, kind, title, height, xtitle, ytitle, axes, rows, traces}. Its traces, by kind:
//   curves     {name, group, x, y, color, width, opacity, dash, points, unnamed}; points: with a
//              mark at each; unnamed: not in the legend; group: traces that are hidden together
//   bars       {name, x, y, color}: a bar for each text of x
//   timeline   {name, color, row, begin, length, text}: boxes in the rows, which are names
// axes: [{label, x}], a button for each; x: the places of each trace's points, if not its own.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const LETTER = 6.2; // pixels, the mean of texts

function add(parent, tag, attributes = {}, text = "") {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== "") made.textContent = text;
    parent.append(made);
    return made;
}

function addHtml(parent, tag, kind, text = "") {
    const made = document.createElement(tag);
    made.className = kind;
    made.textContent = text;
    parent.append(made);
    return made;
}

// The least and the largest number of lists, with a part of their distance at both ends.
function rangeOf(lists, margin) {
    let low = Infinity, high = -Infinity;
    for (const list of lists) {
        for (const value of list) {
            low = Math.min(low, value);
            high = Math.max(high, value);
        }
    }
    if (low > high) return [0, 1];
    const more = (high - low) * margin || Math.abs(low) / 2 || 1;
    return low < high ? [low - more, high + more] : [low - more, low + more];
}

// Values to pixels; .value is the way back.
function scaleOf([low, high], from, to) {
    const scale = (value) => from + ((value - low) / (high - low)) * (to - from);
    scale.value = (pixel) => low + ((pixel - from) / (to - from)) * (high - low);
    return scale;
}

// Round numbers of a range, at most so many and one, each with its text.
function ticksOf([low, high], most) {
    const rough = (high - low) / Math.max(1, most), unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * ([1, 2, 5].find((n) => n * unit >= rough) || 10);
    const largest = Math.max(Math.abs(low), Math.abs(high));
    const [size, sign] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]
        .find(([n]) => largest >= 10 * n) || [1, ""];
    const digits = Math.min(15, 2 + Math.floor(Math.log10(largest / step)));
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high && found.length < 100; i++) {
        const text = String(Number(((i * step) / size).toPrecision(digits)));
        found.push([i * step, i ? text + sign : "0"]);
    }
    return found;
}

class Figure {
    constructor(spec) {
        Object.assign(this, spec);
        this.hidden = new Set();
        this.axis = 0;
        this.view = null; // [range of x, range of y]; null: all
        this.place = document.getElementById(this.id);
        if (this.title) addHtml(this.place, "div", "small", this.title);
        this.legend = addHtml(this.place, "div", "legend");
        this.addLegend();
        this.svg = add(this.place, "svg", { height: this.height });
        this.addAxes();
        this.listen();
        this.draw();
        new ResizeObserver(() => this.place.clientWidth !== this.width && this.draw())
            .observe(this.place);
    }

    groupOf(trace) {
        return trace.group || trace.name;
    }

    addLegend() {
        for (const trace of this.traces.filter((one) => !one.unnamed)) {
            const button = addHtml(this.legend, "button", "name"), group = this.groupOf(trace);
            const sample = add(button, "svg", { width: 24, height: 10 });
            if (this.kind === "curves") {
                this.path(sample, trace, "M0,5H24");
                if (trace.points) this.mark(sample, trace, 12, 5);
            } else {
                add(sample, "rect", { width: 10, height: 10, x: 12, fill: trace.color });
            }
            addHtml(button, "span", "", trace.name);
            button.onclick = () => {
                if (!this.hidden.delete(group)) this.hidden.add(group);
                this.draw();
            };
            button.ondblclick = () => {
                const others = new Set(this.traces.map((one) => this.groupOf(one)));
                others.delete(group);
                this.hidden = [...others].every((one) => this.hidden.has(one)) ? new Set() : others;
                this.draw();
            };
            button.group = group;
        }
    }

    addAxes() {
        const row = addHtml(this.place, "div", "axes");
        this.axes.forEach((axis, i) => {
            const button = addHtml(row, "button", i ? "" : "on", axis.label);
            button.onclick = () => {
                [...row.children].forEach((one) => (one.className = one === button ? "on" : ""));
                this.axis = i;
                this.view = null;
                this.draw();
            };
        });
    }

    draw() {
        this.width = this.place.clientWidth;
        this.svg.setAttribute("width", this.width);
        this.svg.replaceChildren();
        this.shown = this.traces.filter((trace) => !this.hidden.has(this.groupOf(trace)));
        for (const button of this.legend.children) {
            button.classList.toggle("off", this.hidden.has(button.group));
        }
        this["draw_" + this.kind]();
    }

    // The frame of a drawing: this.area, inside the margins; ticks and titles of its axes. An axis
    // without a range has none.
    frame(left, bottom, x, y) {
        const wide = Math.max(50, this.width - left - 12), high = this.height - 10 - bottom;
        Object.assign(this, { left, wide, high });
        this.x = x && scaleOf(x, 0, wide);
        this.y = y && scaleOf(y, high, 0);
        const grid = (d) => add(this.svg, "path", { d, stroke: "#e5e5e5" });
        for (const [value, text] of x ? ticksOf(x, wide / 60) : []) {
            const at = left + this.x(value);
            grid(`M${at},10v${high}`);
            add(this.svg, "text", { x: at, y: high + 26, "text-anchor": "middle" }, text);
        }
        for (const [value, text] of y ? ticksOf(y, high / 45) : []) {
            const at = 10 + this.y(value);
            grid(`M${left},${at}h${wide}`);
            add(this.svg, "text", { x: left - 6, y: at + 4, "text-anchor": "end" }, text);
        }
        const middle = { "text-anchor": "middle" }, center = -10 - high / 2;
        add(this.svg, "text", { x: left + wide / 2, y: high + 46, ...middle }, this.xtitle);
        const upwards = { transform: "rotate(-90)", x: center, y: 14, ...middle };
        add(this.svg, "text", upwards, this.ytitle);
        const shape = { x: left, y: 10, width: wide, height: high };
        this.area = add(this.svg, "svg", { class: "area", ...shape });
    }

    // --- curves ----------------------------------------------------------------------------------
    places(trace) {
        const given = this.axes[this.axis]?.x;
        return given ? given[this.traces.indexOf(trace)] : trace.x;
    }

    path(parent, trace, d) {
        add(parent, "path", {
            class: "curve", d, fill: "none", stroke: trace.color, "stroke-width": trace.width,
            "stroke-linejoin": "round", "stroke-dasharray": trace.dash ? "2 3" : "none",
            opacity: trace.opacity || 1,
        });
    }

    mark(parent, trace, cx, cy) {
        const shape = { cx, cy, r: 3.5, fill: trace.color, stroke: "#000" };
        add(parent, "circle", { class: "point", ...shape });
    }

    draw_curves() {
        const all = [rangeOf(this.shown.map((trace) => this.places(trace)), 0.01),
                     rangeOf(this.shown.map((trace) => trace.y), 0.05)];
        this.frame(this.ytitle ? 62 : 48, this.xtitle ? 56 : 36, ...(this.view || all));
        for (const trace of this.shown) {
            const xs = this.places(trace), at = (i) => [this.x(xs[i]), this.y(trace.y[i])];
            const line = trace.y.map((_, i) => at(i).map((one) => one.toFixed(1)).join());
            this.path(this.area, trace, "M" + (line.length > 1 ? line.join("L") : line + "h1"));
            for (const i of trace.points ? trace.y.keys() : []) {
                this.mark(this.area, trace, ...at(i));
            }
        }
    }

    // Names the point that is nearest to a place.
    point(px, py) {
        let least = 900, best = null;
        for (const trace of this.shown) {
            const xs = this.places(trace);
            for (const i of trace.y.keys()) {
                const at = xs[i], value = trace.y[i], x = this.x(at), y = this.y(value);
                const far = (x - px) ** 2 + (y - py) ** 2;
                if (far < least) [least, best] = [far, { trace, x, y, at, value }];
            }
        }
        this.label?.remove();
        if (!best) return;
        const side = best.x > this.wide / 2 ? -1 : 1, name = this.axes[this.axis]?.label;
        this.label = add(this.area, "g", { class: "label" });
        add(this.label, "circle", { cx: best.x, cy: best.y, r: 4, fill: best.trace.color });
        const shape = { x: best.x + 8 * side, "text-anchor": side < 0 ? "end" : "start" };
        const low = Math.max(14, Math.min(best.y, this.high - 22));
        const texts = [best.trace.name, `${best.value} at ${name ?? this.xtitle} ${best.at}`];
        texts.forEach((text, i) => add(this.label, "text", { ...shape, y: low + 15 * i }, text));
    }

    // --- bars and boxes --------------------------------------------------------------------------
    box(x, y, width, height, trace, text) {
        const shape = { x, y, width: Math.max(0.5, width), height, fill: trace.color };
        const edge = { class: "box", stroke: "#333", "stroke-width": this.x ? 0.5 : 0 };
        add(add(this.area, "rect", { ...shape, ...edge }), "title", {}, text);
    }

    draw_bars() {
        const kinds = [...new Set(this.traces.flatMap((trace) => trace.x))];
        const longest = LETTER * Math.max(...kinds.map((kind) => kind.length));
        const left = 62, slot = (this.width - left - 12) / kinds.length, slanted = longest > slot;
        const most = rangeOf([...this.shown.map((trace) => trace.y), [0]], 0.05)[1];
        this.frame(left, slanted ? Math.min(120, 24 + longest / 2) : 30, null, [0, most]);
        kinds.forEach((kind, i) => {
            const x = left + slot * (i + 0.5), y = this.high + 26;
            add(this.svg, "text", {
                x, y, "text-anchor": slanted ? "end" : "middle",
                transform: slanted ? `rotate(-30 ${x} ${y})` : "",
            }, kind);
        });
        this.shown.forEach((trace, n) => {
            const width = (0.8 * slot) / this.shown.length;
            trace.x.forEach((kind, i) => {
                const x = slot * (kinds.indexOf(kind) + 0.1) + n * width, y = this.y(trace.y[i]);
                const text = `${trace.name}, ${kind}: ${trace.y[i]} ${this.ytitle}`;
                this.box(x, y, width, this.high - y, trace, text);
            });
        });
    }

    draw_timeline() {
        const ends = (trace) => trace.begin.map((begin, i) => begin + trace.length[i]);
        const all = rangeOf(this.traces.flatMap((trace) => [trace.begin, ends(trace)]), 0);
        const left = 12 + LETTER * Math.max(...this.rows.map((name) => name.length));
        this.frame(left, 56, this.view ? this.view[0] : all, null);
        const slot = this.high / this.rows.length, middle = { "text-anchor": "middle" };
        this.rows.forEach((name, i) => {
            const y = 14 + slot * (i + 0.5);
            add(this.svg, "text", { x: left - 6, y, "text-anchor": "end" }, name);
        });
        for (const trace of this.shown) {
            trace.begin.forEach((begin, i) => {
                const x = this.x(begin), width = this.x(begin + trace.length[i]) - x;
                const y = slot * (trace.row[i] + 0.12), text = trace.text[i];
                this.box(x, y, width, slot * 0.76, trace,
                         `${trace.name} ${text}: ${trace.length[i]} ms, from ${begin} ms`);
                if (width > LETTER * text.length + 2) {
                    const where = { x: x + width / 2, y: y + slot * 0.38 + 4 };
                    add(this.area, "text", { ...where, ...middle, "pointer-events": "none" }, text);
                }
            });
        }
    }

    // --- zooming ---------------------------------------------------------------------------------
    listen() {
        let from = null, band = null;
        const place = (event) => {
            const corner = this.svg.getBoundingClientRect();
            const inside = (value, most) => Math.max(0, Math.min(value, most));
            return [inside(event.clientX - corner.left - this.left, this.wide),
                    inside(event.clientY - corner.top - 10, this.high)];
        };
        // A movement along one axis zooms only this one.
        const zoomed = ([x, y]) => [
            Math.abs(x - from[0]) > 8 ? [from[0], x] : [0, this.wide],
            Math.abs(y - from[1]) > 8 && this.y ? [from[1], y] : [0, this.high],
        ].map((pair) => pair.sort((a, b) => a - b));
        const stop = () => {
            band?.remove();
            from = band = null;
        };
        if (this.kind === "bars") return;
        this.svg.onpointerdown = (event) => {
            if (event.button) return;
            from = place(event);
            this.svg.setPointerCapture(event.pointerId);
            event.preventDefault();
        };
        this.svg.onpointermove = (event) => {
            if (!from) return this.kind === "curves" && this.point(...place(event));
            const [[x, right], [y, bottom]] = zoomed(place(event));
            band?.remove();
            band = add(this.area, "rect", {
                x, y, width: right - x, height: bottom - y, fill: "#1f77b4", opacity: 0.15,
            });
        };
        this.svg.onpointerup = (event) => {
            if (!from) return;
            const [[x, right], [y, bottom]] = zoomed(place(event));
            const some = right - x < this.wide || bottom - y < this.high;
            stop();
            if (!some) return;
            this.view = [[this.x.value(x), this.x.value(right)],
                         this.y && [this.y.value(bottom), this.y.value(y)]];
            this.draw();
        };
        this.svg.onpointercancel = stop;
        this.svg.onpointerleave = () => this.label?.remove();
        this.svg.ondblclick = () => {
            this.view = null;
            this.draw();
        };
    }
}

for (const spec of JSON.parse(document.getElementById("figures").textContent)) new Figure(spec);
