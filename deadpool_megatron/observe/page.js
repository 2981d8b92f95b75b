"use strict";
// Draws the state of a run each second. Texts of the run are put in as text, never as markup.
// As it stands in the address: any text.
const TOKEN = encodeURIComponent(new URLSearchParams(location.search).get("token"));
const COLOURS = {
  detect: "#d95f02", close: "#e6a100", wait: "#b9b4a2", decide: "#d9c400", adopt: "#c56fa0", rebuild: "#1b6fb0", restore: "#009e73",
  sync: "#4c8a3f", verify: "#7c6bb0", reprotect: "#6fbfa0", replay: "#56b4e9", abandoned: "#999999",
};
const AT = (id) => document.getElementById(id);
let shown = null, pointer = null;  // the newest state; where the pointer is over the loss, in pixels

const date = (at) => new Date(at * 1000).toLocaleString("sv");  // 2026-11-28 08:05:01, local time
const clock = (at) => date(at).startsWith(date(shown.now).slice(0, 10)) ? date(at).slice(11) : date(at);
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const duration = (s) => s >= 360000 ? `${Math.round(s / 3600).toLocaleString("en")} h` : s >= 5400 ? `${(s / 3600).toFixed(1)} h`
  : s >= 90 ? `${(s / 60).toFixed(1)} min` : `${s.toFixed(s < 10 ? 2 : 1)} s`;

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const html = (name, attributes, ...children) => filled(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

function piece(part, colour, title) {
  const made = html("i", { title });
  made.style.width = `${100 * part}%`;
  made.style.background = colour;
  return made;
}

function drawBanner({ banner, ended, now, run }) {
  const { look, title, why, spares, last_step_at: step, failure, to_do: advice } = banner, facts = [];
  const fact = (before, text, after, look = "") => facts.push(html("span", { class: look }, before, html("b", {}, text), after));
  if (spares) fact("", `${spares[0]} of ${spares[1]}`, " spares left", spares[1] && !spares[0] ? "bad" : "");
  if (step !== null) fact("last iteration ", ended ? clock(step) : `${duration(Math.max(0, now - step))} ago`, "");
  const made = [html("h2", {}, title), html("p", {}, ...facts)];
  if (why) made.push(html("p", {}, html("b", {}, "Why: "), why));
  if (advice) made.push(html("p", {}, html("b", {}, "What to do: "), advice));
  if (failure) {
    const over = failure.seconds === null ? "" : `, over after ${duration(failure.seconds)}`;
    made.push(html("p", {}, html("b", {}, "Last failure: "), `${failure.text} (${clock(failure.began)}${over}).`));
  }
  AT("banner").className = `wide ${look}`;
  AT("banner").replaceChildren(...made);
  AT("run").textContent = run;
  document.title = `${title} – deadpool ${run}`;
}

function drawNumbers(state) {
  const { progress: far } = state, last = state.loss.at(-1)?.[1] ?? null;
  const known = (value, text) => value === null ? "–" : text(value);
  const cells = [
    [far.iterations === null ? "iteration" : `iteration of ${far.iterations.toLocaleString("en")}`, state.iteration.toLocaleString("en")],
    ["loss", known(last, (loss) => loss.toPrecision(5))],
    ["per iteration", known(state.step_seconds, duration)],
    ["samples per second", far.samples_per_second?.toPrecision(3)],
    ["tokens per second", far.tokens_per_second === null ? undefined : Math.round(far.tokens_per_second).toLocaleString("en")],
    ["time left", state.ended || far.seconds_left === null ? undefined : duration(far.seconds_left)],
    ["of the time trained (goodput)", known(state.goodput, (part) => `${(100 * part).toFixed(1)} %`)],
    ["failures survived", state.survived],
  ];
  AT("numbers").replaceChildren(...cells.filter(([, value]) => value !== undefined).map(([title, value]) =>
    html("div", {}, html("b", {}, value), html("span", {}, title))));
}

function ticks(low, high, most, least) {
  if (high <= low) return [Number(low.toPrecision(5))];
  const raw = (high - low) / most, unit = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(least, unit * [1, 2, 5, 10].find((n) => n * unit >= raw * 0.999));
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(9)));
}

function drawLoss(state) {
  const area = AT("loss"), points = state.loss.filter(([, loss]) => loss !== null);
  area.parentElement.hidden = !points.length;
  if (!points.length) return;
  const width = area.clientWidth || 800, height = 200, left = 48, bottom = height - 20, right = width - 12;
  const text = (at, y, anchor, ...shown) => svg("text", { x: at, y, "text-anchor": anchor }, ...shown);
  const losses = points.map(([, loss]) => loss), lowest = Math.min(...losses), highest = Math.max(...losses);
  const first = points[0][0], last = points.at(-1)[0];
  const x = (k) => left + (right - left) * (k - first) / Math.max(1, last - first);
  const y = (loss) => 8 + (bottom - 12) * (highest - loss) / Math.max(1e-12, highest - lowest);
  const upright = (at, look, ...more) => svg("line", { x1: at, x2: at, y1: 4, y2: bottom, class: look }, ...more);
  const far = ([k]) => Math.abs(x(k) - (pointer ?? right));
  const near = points.reduce((best, one) => far(one) <= far(best) ? one : best);
  area.setAttribute("viewBox", `0 0 ${width} ${height}`);
  area.replaceChildren(
    ...ticks(lowest, highest, 6, 0).flatMap((loss) => [
      svg("line", { x1: left, x2: right, y1: y(loss), y2: y(loss) }), text(left - 6, y(loss) + 4, "end", loss)]),
    ...ticks(first, last, width / 110, 1).flatMap((k) => [upright(x(k), ""), text(x(k), height - 4, "middle", k.toLocaleString("en"))]),
    ...state.recoveries.filter((one) => one.last_iteration >= first).map((one) =>
      upright(x(one.last_iteration), one.planned ? "planned" : "failure", svg("title", {}, `${one.text}, ${date(one.began)}`))),
    svg("path", { d: "M" + points.map(([k, loss]) => `${x(k).toFixed(1)} ${y(loss).toFixed(1)}`).join("L") }),
    ...pointer === null ? [] : [upright(x(near[0]), "pointer")], svg("circle", { cx: x(near[0]), cy: y(near[1]), r: 3.5 }),
  );
  AT("point").textContent = `${near[1].toPrecision(6)} at iteration ${near[0].toLocaleString("en")}, ${date(near[2])}`;
}

function troublesOf(status, node, roles) {
  const found = status.troubles.filter(([one]) => one === node).map(([, text]) => text);
  const fewer = roles.filter(([role]) => status.fewer_copies.includes(Number(role))).map(([role]) => role);
  if (fewer.length) found.push(`role ${fewer.join(", ")}: fewer copies than wanted`);
  return found;
}

function drawNodes({ status, lost }) {
  const gone = (planned) => lost.filter((one) => one.planned === planned).map((one) => html("div", { class: `node lost ${planned ? "" : "trouble"}` },
    `node ${one.node}, ${planned ? "left" : "failed"}`, html("small", {}, `${one.host} ${clock(one.at)}: ${one.cause}`)));
  const cards = gone(false);
  const byNode = new Map(Object.keys(status.nodes).map((node) => [node, []])), isLarge = byNode.size > 40;
  for (const entry of Object.entries(status.roles)) byNode.get(String(entry[1].seat[0]))?.push(entry);
  const ranked = [...byNode].map(([node, roles]) => ({ node, roles, troubles: troublesOf(status, node, roles) }));
  const rank = ({ troubles, roles }) => troubles.length ? 0 : roles.length ? 1 : 2;
  ranked.sort((a, b) => rank(a) - rank(b) || a.node - b.node);
  const square = ([role, one]) => {
    const look = one.section !== "step" && one.section !== "first-step" ? "busy" : one.waiting ? "wait" : "";
    const does = `${one.section} of iteration ${one.iteration}${one.waiting ? ", waits in a communication" : ""}`;
    const exposed = status.fewer_copies.includes(Number(role)) ? "exposed" : "";
    return html("span", { class: `role ${look} ${exposed}`, title: `role ${role}: ${does}` }, role);
  };
  for (const { node, roles, troubles } of ranked) {
    const facts = status.nodes[node], { use } = facts, bytes = facts.vault.bytes;
    const small = [facts.host, bytes && `${(bytes / 1e9).toFixed(2)} GB`, facts.restarts && count(facts.restarts, "restart")].filter(Boolean).join(", ");
    const isSmall = isLarge && !troubles.length;
    cards.push(html("div", { class: `node ${facts.spare ? "spare" : ""} ${troubles.length ? "trouble" : ""}`, title: [`node ${node}`, use, small].filter(Boolean).join(", ") },
      isSmall ? node : `node ${node}`, ...isSmall ? [] : [html("small", {}, small)], ...troubles.map((text) => html("em", {}, text)),
      html("div", { class: "roles" }, ...roles.length ? roles.map(square) : [html("small", {}, troubles.includes(use) ? "" : use)])));
  }
  cards.push(...gone(true));
  AT("nodes").classList.toggle("many", isLarge);
  AT("nodes").replaceChildren(...cards);
  AT("legend").hidden = !Object.keys(status.roles).length;
  AT("nodes").parentElement.hidden = !cards.length;
}

function drawRecoveries(state) {
  const longest = Math.max(...state.recoveries.map((one) => one.seconds ?? 0), 1e-9), { reprotect, ...drawn } = state.phases;
  const made = [...state.recoveries].reverse().map((one) => {
    const { reprotect: _, ...phases } = one.phases, whole = Object.values(phases).reduce((sum, s) => sum + s, 0) || 1;
    const facts = [`after iteration ${one.last_iteration}, ${clock(one.began)}`];
    if (one.noticed - one.began >= 1) facts.push(`noticed ${clock(one.noticed)}`);
    facts.push(one.is_cut_short ? "the run ended here" : one.seconds === null ? "not over yet" : `over after ${duration(one.seconds)}`);
    if (one.steps_recomputed) facts.push(`${count(one.steps_recomputed, "iteration")} computed again`);
    if (one.exposed_seconds) facts.push(`${duration(one.exposed_seconds)} without all copies`);
    if (one.to_do) facts.push(`to do: ${one.to_do}`);
    const bar = html("div", { class: "bar" }, ...Object.entries(phases).map(([name, spent]) =>
      piece(spent / whole, COLOURS[name] ?? "#888888", `${name} ${spent.toFixed(3)} s: ${drawn[name] ?? ""}`)));
    bar.style.width = `${Math.max(4, 100 * (one.seconds ?? longest) / longest)}%`;
    const title = `${one.planned ? "planned change" : "failure"} ${one.number}: ${one.text} `;
    return html("div", { class: "recovery" }, html("p", {}, title, html("small", {}, facts.join("; "))), bar);
  });
  const keys = Object.keys(drawn).filter((name) => name !== "abandoned").map((name) => html("span", {}, piece(0, COLOURS[name], ""), name));
  AT("recoveries").replaceChildren(...made.length ? [...made, html("p", { class: "keys" }, ...keys)] : [html("p", { class: "none" }, "none so far")]);
  AT("meanings").replaceChildren(...Object.entries(state.phases).map(([name, text]) => html("tr", {}, html("td", {}, name), html("td", {}, text))));
  AT("meanings").parentElement.hidden = !made.length;
}

function drawUses({ node_seconds: uses }) {
  // A spare node is no loss of time: the parts are of the time of nodes with roles, as goodput is.
  const { spare, ...used } = uses, whole = Object.values(used).reduce((sum, s) => sum + s, 0) || 1, main = {}, phases = [];
  const row = (name, spent, colour) => html("tr", {}, html("td", {}, name.replaceAll("-", " ")),
    html("td", { class: "w" }, colour ? html("div", { class: "bar" }, piece(spent / whole, colour, "")) : ""),
    html("td", { class: "n" }, duration(spent)), html("td", { class: "n" }, colour ? `${(100 * spent / whole).toFixed(1)} %` : ""));
  for (const [use, spent] of Object.entries(used)) {
    const phase = use.match(/^recovery-(.*)/)?.[1], name = phase ? "recovery" : use;
    main[name] = (main[name] ?? 0) + spent;
    if (phase) phases.push(row(phase, spent, COLOURS[phase] ?? COLOURS.abandoned));
  }
  const rows = Object.entries(main).map(([use, spent]) => row(use, spent, use === "training" ? "var(--good)" : "var(--wait)"));
  AT("uses").replaceChildren(...rows, ...spare ? [row("spare (not counted)", spare, "")] : []);
  AT("phases").replaceChildren(...phases);
  AT("phases").parentElement.hidden = !phases.length;
}

function drawLines(state) {
  AT("lines").replaceChildren(...[...state.lines].reverse().map(([at, text, style]) =>
    html("li", { class: ["red", "green", "yellow"].find((colour) => style.includes(colour)) ?? "" }, html("time", { title: date(at) }, clock(at)), text)));
  AT("facts").replaceChildren(...state.facts.map(([name, text]) => html("tr", {}, html("td", {}, name), html("td", {}, text))));
  AT("facts").parentElement.hidden = !state.facts.length;
}

function draw(state) {
  shown = state;
  for (const one of [drawBanner, drawNumbers, drawLoss, drawNodes, drawRecoveries, drawUses, drawLines]) one(state);
}

async function look() {
  try {
    const answer = await fetch(`/state?token=${TOKEN}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    draw(await answer.json());
  } catch (error) {
    AT("banner").className = "wide bad";
    const below = `What is below is of ${date(shown.now)} (${error.message}).`;
    AT("banner").replaceChildren(html("h2", {}, "deadpool serve does not answer"), html("p", {}, below));
  }
  setTimeout(look, 1000);
}

for (const kind of ["pointermove", "pointerdown", "pointerleave"]) {
  AT("loss").addEventListener(kind, (event) => {
    pointer = kind === "pointerleave" ? null : event.clientX - AT("loss").getBoundingClientRect().left;
    drawLoss(shown);
  });
}
window.addEventListener("resize", () => drawLoss(shown));
AT("zone").textContent = `All times are in ${Intl.DateTimeFormat().resolvedOptions().timeZone}`;
// The first state comes with the page itself.
draw(JSON.parse(AT("first").textContent));
look();
