"use strict";
/* Memory of a mapping, recomputed in the page from the numbers of the plan: launch/plan/quick.py says it in Python. */
const book = JSON.parse(document.getElementById("book").textContent);
const FIELDS = ["kept", "stream", "forward", "backward", "late"];
const PARTS = ["parameters", "gradients", "optimizer", "activations", "logits", "working"];
const GIB = 2 ** 30;

/* ---- what each piece of the model keeps and needs of one microbatch */

function effective(recompute) {
  if (recompute.includes("full")) return ["full"];
  const covered = recompute.includes("moe") ? ["moe_act", "shared_experts"] : [];
  const found = recompute.filter((name) => !covered.includes(name)), pair = ["core_attn", "mla_up_proj"];
  if (!pair.every((name) => found.includes(name))) return found;
  return [...found.filter((name) => !pair.includes(name)), pair.join("+")];
}

function loadsAt(at) {
  const own = book.planned, share = own.cp / at.cp, found = {}, changes = book.recompute[at.tp];
  for (const [name, base] of Object.entries(book.byTp[at.tp])) {
    const load = {};
    for (const field of FIELDS) {
      let value = base[field];
      const here = book.byCp[own.cp][name][field], there = book.byCp[at.cp][name][field];
      if (at.cp !== own.cp && here) value *= there / here;
      if (name in book.byEp[at.ep]) value += book.byEp[at.ep][name][field] - book.byEp[own.ep][name][field];
      for (const part of effective(at.recompute)) {
        const change = changes[part][name];
        if (change) value += change[field] * share;
      }
      load[field] = Math.max(0, value) * at.microbatch;
    }
    found[name] = load;
  }
  if (at.tp in book.wholeAhead) {
    const load = {};
    for (const field of FIELDS) load[field] = book.wholeAhead[at.tp][field] * share * at.microbatch;
    found["ahead and its layer"] = load;
  }
  return found;
}

/* ---- a stage: its pieces in order, its fullest moments */

function piecesOf(stage, whole) {
  const found = [];
  if (stage.embedding) found.push(["embedding", false]);
  for (const i of stage.layers) {
    found.push(["layer " + book.kinds[i], found.length > 0]);
    if (i === book.kinds.length - 1) found.push(["final norm", true]);
  }
  for (let d = 0; d < stage.ahead; d++) {
    found.push([whole ? "ahead and its layer" : "ahead", found.length > 0]);
    if (!whole) found.push(["layer " + book.aheadKind, false]);
  }
  if (stage.loss) found.push(["loss", found.length > 0]);
  return found;
}

function fuller(before, activations, logits, needs) {
  const total = activations + logits + needs;
  return before.total > total ? before : { activations, logits, total };
}

function stageLoad(stage, before, loads, at) {
  const stream = (book.stream * book.planned.tp * book.planned.cp) / (at.tp * at.cp) * at.microbatch;
  const turns = book.turns * (book.planned.cp / at.cp) * at.microbatch;
  let held = (stage.embedding ? 0 : before * stream) + (stage.layers.length || stage.ahead ? turns : 0);
  let logits = 0, late = 0;
  let forward = { activations: held, logits: 0, total: held }, backward = { activations: 0, logits: 0, total: 0 };
  for (const [name, own] of piecesOf(stage, at.recompute.includes("full"))) {
    const load = loads[name];
    if (own) held += load.stream;
    if (name === "loss") logits += load.kept; else held += load.kept;
    late += load.late;
    forward = fuller(forward, held, logits, load.forward);
    backward = fuller(backward, held, logits, load.backward);
  }
  held += stage.loss ? 0 : (before + stage.ahead) * stream;
  return { activations: held, logits, late, forward: fuller(forward, held, logits, 0), backward: fuller(backward, held, logits, 0) };
}

/* ---- the schedule of one rank, as core/pipeline/schedule.py makes it */

function forwardOrder(pp, vpp, microbatches) {
  const found = [];
  if (vpp === 1) { for (let j = 0; j < microbatches; j++) found.push([0, j]); return found; }
  for (let first = 0; first < microbatches; first += pp)
    for (let chunk = 0; chunk < vpp; chunk++) for (let j = 0; j < pp; j++) found.push([chunk, first + j]);
  return found;
}

function actionsOf(schedule, rank, pp, vpp, microbatches) {
  const found = [];
  if (schedule === "gpipe") {
    for (let c = 0; c < vpp; c++) for (let j = 0; j < microbatches; j++) found.push(["forward", c]);
    for (let c = vpp - 1; c >= 0; c--) for (let j = 0; j < microbatches; j++) found.push(["backward", c]);
    return found;
  }
  const whole = vpp === 1 ? microbatches : Math.ceil(microbatches / pp) * pp, behind = pp - 1 - rank;
  const there = ([, j]) => j < microbatches;
  const forwards = forwardOrder(pp, vpp, whole), backwards = forwards.map(([c, j]) => [vpp - 1 - c, j]);
  let ahead = vpp === 1 ? behind : 2 * behind + (vpp - 1) * pp;
  if (schedule === "combined") ahead = 2 * behind + (vpp - 1) * pp + 1;
  ahead = Math.min(ahead, forwards.length);
  const late = [];
  for (let i = 0; i < Math.max(forwards.length, backwards.length + ahead) + (schedule === "zero_bubble" ? rank : 0); i++) {
    const f = i < forwards.length && there(forwards[i]) ? forwards[i] : null;
    const b = i >= ahead && i - ahead < backwards.length && there(backwards[i - ahead]) ? backwards[i - ahead] : null;
    if (schedule === "combined" && f && b) { found.push(["combined", f[0], b[0]]); continue; }
    if (f) found.push(["forward", f[0]]);
    if (b) found.push([schedule === "zero_bubble" ? "input_gradient" : "backward", b[0]]);
    if (schedule === "zero_bubble") {
      late.push(b);
      const due = late.length > rank ? late[late.length - 1 - rank] : null;
      if (due) found.push(["weight_gradient", due[0]]);
    }
  }
  return found;
}

function fullest(actions, loads, turns) {
  const waiting = loads.map(() => 0), late = loads.map(() => 0);
  let best = null;
  const meet = (...running) => {
    // Halves of a combined action that take turns: the fuller one counts.
    const moments = turns ? [running.reduce((best, m) => (m.total > best.total ? m : best))] : running;
    let activations = 0, logits = 0, working = 0;
    loads.forEach((load, c) => { activations += waiting[c] * load.activations + late[c] * load.late; logits += waiting[c] * load.logits; });
    for (const m of moments) { activations += m.activations; logits += m.logits; working += m.total - m.activations - m.logits; }
    if (!best || activations + logits + working > best.activations + best.logits + best.working) best = { activations, logits, working };
  };
  for (const [kind, chunk, back] of actions) {
    if (kind === "forward") { meet(loads[chunk].forward); waiting[chunk]++; }
    else if (kind === "combined") {
      const halves = [loads[chunk].forward, loads[back].backward];
      waiting[back]--;
      meet(...(turns ? [halves[halves[0].total >= halves[1].total ? 0 : 1]] : halves));
      waiting[chunk]++;
    }
    else if (kind === "weight_gradient") late[chunk]--;
    else { waiting[chunk]--; meet(loads[chunk].backward); if (kind === "input_gradient") late[chunk]++; }
  }
  return best;
}

/* ---- what a rank holds from step to step */

function residents(stages, at) {
  const table = book.elements[at.tp], spread = at.ep * book.etp, bytes = book.bytes;
  const owners = [];
  if (stages.some((s) => s.embedding || s.ahead || (s.loss && book.tied))) owners.push("embedding");
  for (const s of stages) {
    for (const i of s.layers) { owners.push("layers." + book.kinds[i]); if (i === book.kinds.length - 1) owners.push("final_norm"); }
    for (let d = 0; d < s.ahead; d++) owners.push("mtp." + d);
  }
  if (!book.tied && stages.some((s) => s.loss)) owners.push("head");
  const sum = (field) => owners.reduce((total, name) => total + table[name][field], 0);
  const dense = sum("dense"), experts = sum("experts") / spread, low = sum("quantised_dense") + sum("quantised_experts") / spread;
  const copies = [at.dp * at.cp, at.edp];
  let weights = bytes.element * (dense + experts) - bytes.saved * low, gradients = bytes.gradient * (dense + experts);
  if (book.fsdp) weights = gradients = 4 * (dense / (copies[0] / book.fsdp) + experts / Math.max(1, copies[1] / book.fsdp));
  const bucket = bytes.bucket / bytes.element, most = (field) => Math.max(0, ...owners.map((name) => table[name][field]));
  let travelling = copies[0] > 1 ? Math.max(Math.min(dense, bucket), most("largest")) : 0;
  if (copies[1] > 1) travelling = Math.max(travelling, Math.min(experts, bucket), most("largest_expert") / spread);
  const states = bytes.states * (dense / copies[0] + experts / copies[1]);
  return { parameters: weights + sum("buffers"), gradients, optimizer: states * (1 - book.onHost) + travelling * bytes.gradient };
}

function memoryAt(at) {
  const loads = loadsAt(at), stages = book.layouts[at.pp][at.vpp].stages, made = [];
  const turns = at.schedule === "combined" && Math.max(at.tp, at.cp, at.ep, book.etp) > 1;
  let before = 1;
  for (const stage of stages) { made.push(stageLoad(stage, before, loads, at)); before += stage.ahead; }
  const microbatches = at.schedule === "gpipe" ? at.microbatches : Math.min(at.microbatches, 4 * at.pp);
  const stream = (book.stream * book.planned.tp * book.planned.cp) / (at.tp * at.cp) * at.microbatch;
  return Array.from({ length: at.pp }, (_, rank) => {
    const mine = (all) => all.filter((_, s) => s % at.pp === rank);
    const held = fullest(actionsOf(at.schedule, rank, at.pp, at.vpp, Math.max(1, microbatches)), mine(made), turns);
    const memory = { ...residents(mine(stages), at), ...held };
    memory.working += at.pp > 1 ? 2 * stream : 0;
    memory.total = PARTS.reduce((total, part) => total + memory[part], 0);
    return memory;
  });
}

/* ---- where the sliders stand */

const SLIDERS = ["tp", "cp", "pp", "vpp", "ep", "microbatch", "batch"];

function positionFrom(values) {
  const at = { ...values, schedule: book.schedule };
  const offered = Object.keys(book.layouts[at.pp]).map(Number);
  at.vpp = offered.reduce((best, v) => (Math.abs(v - at.vpp) < Math.abs(best - at.vpp) ? v : best), offered[0]);
  at.dp = book.ranks / (at.tp * at.cp * at.pp);
  at.edp = book.ranks / (book.etp * at.ep * at.pp);
  at.microbatches = at.batch / (at.dp * at.microbatch);
  at.broken = [];
  if (!Number.isInteger(at.dp)) at.broken.push(`tp × cp × pp = ${at.tp * at.cp * at.pp} does not divide ${book.ranks} ranks`);
  if (!Number.isInteger(at.edp)) at.broken.push(`etp × ep × pp = ${book.etp * at.ep * at.pp} does not divide ${book.ranks} ranks`);
  if (Number.isInteger(at.dp) && !Number.isInteger(at.microbatches))
    at.broken.push(`a batch of ${at.batch} is no multiple of ${at.dp} replicas × microbatch ${at.microbatch}`);
  if (at.schedule === "combined" && (at.recompute.includes("full") || at.recompute.includes("moe")))
    at.broken.push("the combined schedule cannot compute whole layers or experts again");
  if (at.schedule === "combined" && at.pp > 1 && at.vpp === 1) at.broken.push("the combined schedule needs vpp above 1");
  return at;
}

const slider = (name) => document.getElementById("slide-" + name);
const box = (name) => document.getElementById("again-" + name);
const near = (values, wanted) => values.reduce((best, v, i) => (Math.abs(v - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);

function read() {
  const values = { recompute: book.recomputable.filter((name) => box(name).checked) };
  for (const name of SLIDERS) values[name] = book.options[name][slider(name).value];
  return positionFrom(values);
}

function set(values) {
  for (const name of SLIDERS) if (values[name] !== undefined) slider(name).value = near(book.options[name], values[name]);
  if (values.recompute) for (const name of book.recomputable) box(name).checked = values.recompute.includes(name);
}

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1)), values = {};
  for (const name of SLIDERS) if (asked.has(name)) values[name] = Number(asked.get(name));
  if (asked.has("recompute")) values.recompute = asked.get("recompute").split(",").filter(Boolean);
  return values;
}

/* ---- drawing */

const gib = (bytes) => (bytes >= GIB / 10 ? (bytes / GIB).toFixed(1) + " GiB" : (bytes / 2 ** 20).toFixed(1) + " MiB");
const element = (tag, properties = {}, ...inside) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...inside);
  return made;
};

function draw() {
  const at = read();
  for (const name of SLIDERS) {
    const shown = name === "vpp" ? at.vpp : at[name];
    document.getElementById("value-" + name).textContent = shown.toLocaleString("en");
    slider(name).setAttribute("aria-valuetext", `${name} ${shown}`);
  }
  const legal = at.broken.length === 0, stages = legal ? memoryAt(at) : [];
  const worst = stages.reduce((best, s, i) => (s.total > (stages[best] || { total: -1 }).total ? i : best), 0);
  verdict(at, stages, worst);
  bars(stages, worst);
  numbers(stages);
  command(at);
}

function verdict(at, stages, worst) {
  const line = document.getElementById("verdict"), detail = document.getElementById("detail");
  if (at.broken.length) {
    line.className = "verdict bad";
    line.textContent = "Cannot run: " + at.broken[0] + ".";
    detail.textContent = at.broken.slice(1).join("; ");
    return;
  }
  const total = stages[worst].total, free = book.capacity === null ? null : book.capacity - total;
  line.className = "verdict " + (free === null ? "" : free >= 0 ? "good" : "bad");
  line.textContent = free === null ? `The fullest rank needs ${gib(total)}.`
    : free >= 0 ? `Fits: ${gib(total)} of ${gib(book.capacity)}, ${gib(free)} free.`
    : `Does not fit: ${gib(total)} of ${gib(book.capacity)}, ${gib(-free)} too much.`;
  detail.textContent = `Fullest at place ${worst} of the pipeline. ${at.dp.toLocaleString("en")} replicas, ` +
    `${at.microbatches.toLocaleString("en")} microbatches each, layout ${book.layouts[at.pp][at.vpp].text}`;
}

function bars(stages, worst) {
  const holder = document.getElementById("stages"), most = Math.max(book.capacity || 0, ...stages.map((s) => s.total)) * 1.03 || 1;
  holder.replaceChildren(...stages.map((memory, place) => {
    const bar = element("div", { className: "bar" });
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `Place ${place}: ` + PARTS.map((part) => `${part} ${gib(memory[part])}`).join(", "));
    for (const part of PARTS) {
      const piece = element("i", { title: `${part}: ${gib(memory[part])}` });
      piece.style.cssText = `width:${(100 * memory[part]) / most}%;background:var(--${part})`;
      bar.append(piece);
    }
    if (book.capacity !== null) {
      const limit = element("b", { className: "limit", title: "capacity" });
      limit.style.left = `calc(${(100 * book.capacity) / most}% - 1px)`;
      bar.append(limit);
    }
    const total = element("span", {}, gib(memory.total));
    if (place === worst) total.style.fontWeight = 600;
    return element("div", { className: "stage" }, element("span", {}, "pp " + place), bar, total);
  }));
}

function numbers(stages) {
  document.getElementById("numbers").replaceChildren(...stages.map((memory, place) => {
    const row = element("tr", {}, element("td", {}, String(place)));
    for (const part of [...PARTS, "total"]) {
      const cell = element("td", { className: "number" }, gib(memory[part]));
      cell.dataset.part = part;
      cell.dataset.bytes = Math.round(memory[part]);
      row.append(cell);
    }
    return row;
  }));
}

function command(at) {
  const own = book.planned, changed = [];
  for (const name of ["tp", "cp", "pp", "vpp", "ep"]) if (at[name] !== own[name]) changed.push(`--set parallel.${name}=${at[name]}`);
  if (at.pp !== own.pp || at.vpp !== own.vpp) changed.push(`--set 'parallel.layout=${book.layouts[at.pp][at.vpp].text}'`);
  if (at.microbatch !== own.microbatch) changed.push(`--set train.microbatch=${at.microbatch}`);
  if (at.batch !== own.batch) changed.push(`--set train.global_batch=${at.batch}`);
  const again = at.recompute.join(",") || "none";
  if (again !== (own.recompute.join(",") || "none")) changed.push(`--set memory.recompute=${again}`);
  document.getElementById("command").textContent = changed.join(" ") || "(as planned)";
}

for (const name of SLIDERS) {
  slider(name).max = book.options[name].length - 1;
  slider(name).disabled = book.options[name].length < 2;
  slider(name).addEventListener("input", draw);
}
for (const name of book.recomputable) box(name).addEventListener("input", draw);
document.getElementById("back").addEventListener("click", () => { set(book.planned); draw(); });
window.addEventListener("hashchange", () => { set(fromAddress()); draw(); });
const filter = document.getElementById("filter");
filter.addEventListener("input", () => {
  for (const row of document.querySelectorAll("#settings tr")) row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase());
});
set(book.planned);
set(fromAddress());
draw();
