"use strict";
// Draws the state of a run again and again. Texts of the run are put in as text, never as markup.
// As it stands in the address: any text.
const TOKEN = encodeURIComponent(new URLSearchParams(location.search).get("token"));
const COLOURS = {
  detect: "#d95f02", close: "#e6a100", decide: "#d9c400", adopt: "#c56fa0", rebuild: "#1b6fb0", restore: "#009e73",
  sync: "#4c8a3f", verify: "#7c6bb0", reprotect: "#6fbfa0", replay: "#56b4e9", abandoned: "#999999",
};
const AT = (id) => document.getElementById(id);
const time = (at) => new Date(at * 1000).toLocaleTimeString();
const seconds = (s) => s >= 5400 ? `${(s / 3600).toFixed(1)} h` : s >= 90 ? `${(s / 60).toFixed(1)} min` : `${s.toFixed(s < 10 ? 2 : 1)} s`;

function element(name, text, ...classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const one of classes) if (one) made.classList.add(one);
  return made;
}

function drawPhase(state) {
  const { status, ended } = state;
  let text = "nobody answers", look = "bad";
  if (ended) {
    text = `ended with status ${ended.exit_status}${ended.reason ? ": " + ended.reason : ""}`;
    look = ended.exit_status === 0 ? "good" : "bad";
  } else if (status) {
    text = status.phase + (status.waiting_for ? `, waits for ${status.waiting_for}` : "") + (status.failing.cause ? `: ${status.failing.cause}` : "");
    look = status.phase === "running" ? "good" : "wait";
  }
  AT("phase").textContent = text;
  AT("phase").className = look;
}

const stateOf = (status, node) => status.aside.includes(Number(node)) ? "aside" : status.nodes[node].spare ? "spare" : "training";

function drawNumbers(state) {
  const { status, progress: far } = state, last = state.loss.at(-1)?.[1] ?? null;
  const known = (value, text) => value === null ? "–" : text(value);
  const shown = [
    [far.iterations === null ? "iteration" : `iteration of ${far.iterations}`, state.iteration],
    ["loss", known(last, (loss) => loss.toPrecision(5))],
    ["per iteration", known(state.step_seconds, seconds)],
    ["samples/s", far.samples_per_second?.toPrecision(3)],
    ["tokens/s", far.tokens_per_second === null ? undefined : Math.round(far.tokens_per_second).toLocaleString("en")],
    ["time left", state.ended || far.seconds_left === null ? undefined : seconds(far.seconds_left)],
    ["goodput", known(state.goodput, (part) => (100 * part).toFixed(1) + " %")],
    ["recoveries", state.recovery_count],
    ["spares", status ? Object.keys(status.nodes).filter((n) => stateOf(status, n) === "spare").length : "–"],
    ["iterations at stake", status ? status.rpo.most_lost : "–"],
    ["epoch", state.epoch],
  ];
  AT("numbers").replaceChildren(...shown.filter(([, value]) => value !== undefined).map(([title, value]) => {
    const cell = element("div");
    cell.append(element("b", String(value)), element("span", title));
    return cell;
  }));
}

function drawLoss(state) {
  const svg = AT("loss"), ns = "http://www.w3.org/2000/svg";
  const points = state.loss.filter(([, y]) => Number.isFinite(y));
  if (points.length < 2) { svg.replaceChildren(); return; }
  const width = svg.clientWidth || 800, height = 180, left = 44, bottom = 18;
  const ys = points.map(([, y]) => y), lowest = Math.min(...ys), highest = Math.max(...ys), first = points[0][0], last = points.at(-1)[0];
  const x = (k) => left + (width - left - 6) * (k - first) / Math.max(1, last - first);
  const y = (v) => 6 + (height - bottom - 6) * (highest - v) / Math.max(1e-12, highest - lowest);
  const made = (name, attributes, text) => {
    const one = document.createElementNS(ns, name);
    for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const marks = state.recoveries.filter((r) => r.after_iteration >= first).map((r) => made("line", { x1: x(r.after_iteration), x2: x(r.after_iteration), y1: 4, y2: height - bottom }));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(
    ...marks,
    made("path", { d: "M" + points.map(([k, v]) => `${x(k).toFixed(1)} ${y(v).toFixed(1)}`).join("L") }),
    made("text", { x: 0, y: 14 }, highest.toPrecision(4)), made("text", { x: 0, y: height - bottom }, lowest.toPrecision(4)),
    made("text", { x: left, y: height - 4 }, `iteration ${first}`), made("text", { x: width - 6, y: height - 4, "text-anchor": "end" }, String(last)),
  );
}

function drawNodes(state) {
  const at = AT("nodes");
  if (!state.status) { at.replaceChildren(element("p", "nobody answers", "none")); AT("legend").textContent = ""; return; }
  const byNode = new Map(Object.keys(state.status.nodes).map((node) => [node, []]));
  for (const [role, one] of Object.entries(state.status.roles)) byNode.get(String(one.seat[0]))?.push([role, one]);
  at.classList.toggle("many", byNode.size > 40);
  at.replaceChildren(...[...byNode].map(([node, roles]) => {
    const facts = state.status.nodes[node], place = stateOf(state.status, node), bytes = facts.vault.bytes;
    const card = element("div", undefined, "node", place, node in state.status.slow && "slow", facts.standing === "left out" && "leftout");
    card.title = `node ${node}, ${facts.host}, ${place}, ${facts.restarts} restarts ${facts.reasons.join("; ")}`;
    card.append(element("span", byNode.size > 40 ? node : `node ${node}`));
    if (byNode.size <= 40) card.append(element("small", `${facts.host} ${bytes ? (bytes / 1e9).toFixed(2) + " GB" : ""}`));
    const row = element("div", undefined, "roles");
    for (const [role, one] of roles) {
      const exposed = state.status.fewer_copies.includes(Number(role));
      const busy = one.section !== "step" && one.section !== "train";
      const dot = element("span", role, "role", busy ? "busy" : one.waiting && "wait", exposed && "exposed");
      dot.title = `role ${role}: ${one.section} of iteration ${one.iteration}${one.waiting ? ", waits in a communication" : ""}${exposed ? ", fewer copies than wanted" : ""}`;
      row.append(dot);
    }
    if (!roles.length) row.append(element("small", place));
    card.append(row);
    return card;
  }));
  AT("legend").textContent = "A square is a role: it computes (green), waits in a communication (blue), or is between steps (yellow); a red frame: fewer copies than wanted. A bar at the left: trains (green), spare (grey), aside or slow (yellow).";
}

function drawRecoveries(state) {
  if (!state.recoveries.length) { AT("recoveries").replaceChildren(element("p", "none", "none")); return; }
  const longest = Math.max(...state.recoveries.map((r) => r.seconds ?? 0), 1e-9);
  const keys = element("p", undefined, "none");
  for (const name of Object.keys(state.phases).filter((n) => n !== "abandoned" && n !== "reprotect")) {
    const key = element("span", undefined, "key");
    key.style.background = COLOURS[name];
    keys.append(key, `${name}  `);
  }
  AT("recoveries").replaceChildren(...[...state.recoveries].reverse().map((one) => {
    const box = element("div", undefined, "recovery"), bar = element("div", undefined, "bar");
    const title = element("p", `${one.planned ? "planned swap" : "failure"} ${one.number}: ${one.cause} `);
    const took = one.seconds === null ? "not over yet" : `${seconds(one.seconds)}, ${one.recomputed} iterations again`;
    title.append(element("small", `after iteration ${one.after_iteration}, ${time(one.at)}; ${took}; ${one.exposed_seconds.toFixed(2)} s without all copies`));
    bar.style.width = `${Math.max(4, 100 * (one.seconds ?? longest) / longest)}%`;
    const parts = Object.entries(one.phases).filter(([name]) => name !== "reprotect"), whole = parts.reduce((sum, [, s]) => sum + s, 0) || 1;
    for (const [name, spent] of parts) {
      const piece = element("i");
      piece.style.flex = String(spent / whole);
      piece.style.background = COLOURS[name] ?? "#888888";
      piece.title = `${name} ${spent.toFixed(3)} s: ${state.phases[name] ?? ""}`;
      bar.append(piece);
    }
    box.append(title, bar);
    return box;
  }), keys);
}

function drawUses(state) {
  const uses = Object.entries(state.node_seconds), whole = uses.reduce((sum, [, s]) => sum + s, 0) || 1;
  const rows = element("table");
  for (const [use, spent] of uses) {
    const row = element("tr"), bar = element("div", undefined, "bar"), piece = element("i"), cell = element("td", undefined, "w");
    piece.style.width = `${100 * spent / whole}%`;
    piece.style.background = use === "training" ? "var(--good)" : use === "spare" ? "var(--spare)" : "var(--wait)";
    bar.append(piece);
    cell.append(bar);
    row.append(element("td", use), cell, element("td", seconds(spent), "n"), element("td", `${(100 * spent / whole).toFixed(1)} %`, "n"));
    rows.append(row);
  }
  AT("uses").replaceChildren(rows);
}

function drawLines(state) {
  AT("lines").replaceChildren(...[...state.lines].reverse().map(([at, text, style]) => {
    const line = element("li", undefined, ["red", "green", "yellow"].find((colour) => style.includes(colour)));
    line.append(element("time", time(at)), text);
    return line;
  }));
}

function draw(state) {
  AT("run").textContent = state.run;
  document.title = `deadpool ${state.run}`;
  for (const one of [drawPhase, drawNumbers, drawLoss, drawNodes, drawRecoveries, drawUses, drawLines]) one(state);
}

async function look() {
  try {
    const answer = await fetch(`/state?token=${TOKEN}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    draw(await answer.json());
  } catch (error) {
    AT("phase").textContent = `the page's own server does not answer (${error.message})`;
    AT("phase").className = "bad";
  }
  setTimeout(look, 1000);
}

// The first state comes with the page itself.
draw(JSON.parse(AT("first").textContent));
look();
