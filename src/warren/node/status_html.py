"""The page of `status_page.py`: its style, its script and the HTML around them, in one text without any other file.

Rules of the script:

1. What comes from the broker goes into text nodes and into the `title` attribute, never into markup.
2. Elements are kept and changed in place, by key: a page that is built anew every second loses selections and its position.
3. One question at a time. The next is asked a second after the last was answered, and none while the page is hidden.
4. At most `MOST_ROWS` queues are drawn, after sorting and filtering; the count below the table says how many there are.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f9; --card: #ffffff; --ink: #16191f; --soft: #626b7a; --line: #e2e6ec; --hover: #f1f4f9;
  --accent: #2457d6; --good: #178a4c; --warn: #b45309; --bad: #c62828;
  --q4: #2457d6; --q3: #6ea3ff; --delta: #a3abb8; --q2: #f2b25c; --q1: #d9730d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0e1116; --card: #161b22; --ink: #e8ecf2; --soft: #8f9aab; --line: #262d38; --hover: #1c232d;
    --accent: #7aa5ff; --good: #4cc38a; --warn: #f0a94a; --bad: #ff7b72;
    --q4: #4f83ff; --q3: #9dc0ff; --delta: #667082; --q2: #f5c98a; --q1: #ef8e3b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 20px 24px 40px; max-width: 1400px; background: var(--ground); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums;
}
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 18px; margin-bottom: 16px; }
h1 { font-size: 22px; margin: 0; letter-spacing: -.02em; }
h2 { font-size: 15px; margin: 0; }
#facts { color: var(--soft); display: flex; flex-wrap: wrap; gap: 2px 16px; }
#facts b { color: var(--ink); font-weight: 600; }
#pulse { margin-left: auto; color: var(--soft); white-space: nowrap; }
.dot {
  display: inline-block; width: 8px; height: 8px; border-radius: 50%; background: var(--delta); margin-right: 7px;
}
.good .dot { background: var(--good); } .warn .dot { background: var(--warn); } .bad .dot { background: var(--bad); }
.bad { color: var(--bad); }
.alarm {
  border: 1px solid var(--bad); color: var(--bad); background: var(--card); border-radius: 8px; padding: 8px 14px;
  margin-bottom: 10px;
}
#totals { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: 10px; margin-bottom: 20px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 14px; }
.card span { color: var(--soft); font-size: 12px; display: block; }
.card b { font-size: 21px; font-weight: 650; letter-spacing: -.02em; }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin-bottom: 20px; overflow: hidden;
}
.bar-above { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 16px; padding: 12px 14px; }
.legend { color: var(--soft); font-size: 12px; display: flex; flex-wrap: wrap; gap: 2px 12px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
input, select {
  font: inherit; color: inherit; background: var(--ground); border: 1px solid var(--line); border-radius: 7px;
  padding: 5px 10px; min-width: 0;
}
#filter { margin-left: auto; width: 210px; }
#sort-label { display: none; color: var(--soft); }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 7px 14px; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
th { font-weight: 500; color: var(--soft); padding: 0; }
th button {
  font: inherit; color: inherit; background: none; border: 0; padding: 7px 14px; cursor: pointer; width: 100%;
  text-align: inherit; white-space: nowrap;
}
th button:hover, th[aria-sort] button { color: var(--ink); }
th button:focus-visible, input:focus-visible, select:focus-visible { outline: 2px solid var(--accent); outline-offset: -2px; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.text { text-align: left; }
td.name { max-width: 320px; overflow: hidden; text-overflow: ellipsis; font-weight: 550; white-space: pre; }
.called { display: flex; align-items: baseline; }
.called span:first-child { overflow: hidden; text-overflow: ellipsis; }
tbody tr:hover { background: var(--hover); }
.none { color: var(--soft); opacity: .55; }
.tag {
  font-size: 11px; font-weight: 400; color: var(--soft); border: 1px solid var(--line); border-radius: 5px; padding: 0 5px;
  margin-left: 7px;
}
.zones { display: flex; height: 12px; width: 150px; border-radius: 4px; overflow: hidden; background: var(--line); }
.zones i { display: block; min-width: 0; }
.zones .some { min-width: 2px; }
.q1 { background: var(--q1); } .q2 { background: var(--q2); } .delta { background: var(--delta); }
.q3 { background: var(--q3); } .q4 { background: var(--q4); }
footer, #count { color: var(--soft); font-size: 12px; }
#count { padding: 8px 14px; border-top: 1px solid var(--line); }
@media (max-width: 720px) {
  body { padding: 14px 12px 30px; }
  #pulse { margin-left: 0; }
  #totals { grid-template-columns: repeat(3, 1fr); gap: 8px; }
  .card { padding: 8px 10px; } .card b { font-size: 17px; }
  #filter { margin-left: 0; flex: 1 1 140px; width: auto; }
  #sort-label { display: block; flex: 1 1 140px; } #sort-label select { width: 100%; }
  thead { display: none; }
  table, tbody { display: block; }
  tbody tr {
    display: grid; grid-template-columns: repeat(3, 1fr); gap: 4px 12px; padding: 10px 14px;
    border-top: 1px solid var(--line);
  }
  td { display: block; border: 0; padding: 0; text-align: left; min-width: 0; }
  td::before { content: attr(data-label); display: block; color: var(--soft); font-size: 11px; font-weight: 400; }
  td.name { grid-column: 1 / -1; max-width: none; font-size: 15px; }
  td.name::before { display: none; }
  td.wide { grid-column: 1 / -1; order: 1; }
  .zones { width: 100%; margin-top: 4px; }
}
"""

SCRIPT = """
"use strict";
const MOST_ROWS = 500;
const ZONES = ["q4", "q3", "delta", "q2", "q1"];
const whole = new Intl.NumberFormat("en");
const one = new Intl.NumberFormat("en", {maximumFractionDigits: 1});
const number = value => Number.isFinite(+value) ? +value : 0;
const count = value => whole.format(Math.round(number(value)));
const rate = value => number(value) >= 100 ? count(value) : one.format(number(value));
function bytes(value) {
  let size = number(value), unit = 0;
  const units = ["B", "KB", "MB", "GB", "TB"];
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit++; }
  return (size >= 100 || unit === 0 ? count(size) : one.format(size)) + " " + units[unit];
}
function span(seconds) {
  const s = Math.floor(number(seconds)), d = Math.floor(s / 86400);
  const h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
  return d ? d + " d " + h + " h" : h ? h + " h " + m + " min" : m ? m + " min " + s % 60 + " s" : s + " s";
}
const byId = id => document.getElementById(id);
function make(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}
function put(element, text) { if (element.textContent !== text) element.textContent = text; }
const tone = state => state === "running" ? "good" : state === "down" || state === "failed" ? "bad" : "warn";

const VHOST = [
  {label: "vhost", of: v => v.name, text: 1, name: 1},
  {label: "state", of: v => v.state, text: 1, draw: drawState},
  {label: "pid", of: v => v.pid, show: String},
  {label: "connections", of: v => v.connections, show: count},
  {label: "channels", of: v => v.channels, show: count},
  {label: "queues", of: v => v.queues.length, show: count},
  {label: "memory", of: v => v.memory_bytes, show: bytes},
];
const QUEUE = [
  {label: "queue", of: q => q.name, text: 1, name: 1, draw: drawName},
  {label: "vhost", of: q => q.vhost, text: 1},
  {label: "ready", of: q => q.messages_ready, show: count},
  {label: "unacked", of: q => q.messages_unacknowledged, show: count},
  {label: "consumers", of: q => q.consumers, show: count},
  {label: "in /s", of: q => q.publish_rate, show: rate},
  {label: "out /s", of: q => q.deliver_rate, show: rate},
  {label: "ack /s", of: q => q.ack_rate, show: rate},
  {label: "where messages are", of: q => number(q.delta), text: 1, wide: 1, draw: drawZones},
  {label: "RAM", of: q => q.ram_bytes, show: bytes},
];

const largestFirst = column => !column.text || !!column.wide;

function drawState(cell, vhost) {
  if (!cell.firstChild) cell.append(make("span", "dot"), make("span"));
  cell.className = "text " + tone(vhost.state);
  put(cell.lastChild, String(vhost.state));
}
function drawName(cell, queue) {
  if (!cell.firstChild) {
    const box = make("div", "called");
    box.append(make("span"), make("span", "tag"));
    cell.append(box);
  }
  const [name, tag] = cell.firstChild.children;
  put(name, String(queue.name));
  cell.title = String(queue.name);
  const marks = [];
  if (queue.durable === false) marks.push("transient");
  if (queue.state && queue.state !== "running") marks.push(queue.state);
  put(tag, marks.join(", "));
  tag.hidden = !marks.length;
}
function drawZones(cell, queue) {
  if (!cell.firstChild) {
    const bar = make("div", "zones");
    bar.setAttribute("role", "img");
    for (const zone of ZONES) bar.append(make("i", zone));
    cell.append(bar);
  }
  const bar = cell.firstChild, total = ZONES.reduce((sum, zone) => sum + number(queue[zone]), 0);
  ZONES.forEach((zone, at) => {
    const part = number(queue[zone]), piece = bar.children[at];
    piece.style.width = total ? 100 * part / total + "%" : "0";
    piece.className = part ? zone + " some" : zone;
  });
  bar.title = ZONES.map(zone => zone + " " + count(queue[zone])).join("   ");
  bar.setAttribute("aria-label", "head to tail: " + bar.title);
}

class Grid {
  constructor(table, columns, sorted, down) {
    Object.assign(this, {columns, sorted, down, rows: new Map(), body: make("tbody"), shown: []});
    const head = make("thead"), line = make("tr");
    this.heads = columns.map((column, at) => {
      const cell = make("th", column.text ? "text" : ""), button = make("button", "", column.label);
      button.type = "button";
      button.addEventListener("click", () => this.sort(at, this.sorted === at ? !this.down : largestFirst(column)));
      cell.append(button);
      line.append(cell);
      return cell;
    });
    head.append(line);
    table.append(head, this.body);
  }
  sort(at, down) { this.sorted = at; this.down = down; draw(); }
  draw(items, key) {
    const of = this.columns[this.sorted].of, sign = this.down ? -1 : 1;
    this.heads.forEach((cell, at) => {
      if (at === this.sorted) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, "en", {numeric: true}) : number(a) - number(b);
    // Equal ones by their key, so that rows do not dance.
    const drawn = items.map(item => [item, key(item)])
      .sort((a, b) => sign * compare(of(a[0]), of(b[0])) || compare(a[1], b[1])).slice(0, MOST_ROWS);
    const seen = new Set();
    drawn.forEach(([item, name], at) => {
      seen.add(name);
      let row = this.rows.get(name);
      if (!row) this.rows.set(name, row = this.row());
      this.columns.forEach((column, each) => this.cell(row.children[each], column, item));
      if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] || null);
    });
    for (const [name, row] of this.rows) if (!seen.has(name)) { row.remove(); this.rows.delete(name); }
    return drawn.length;
  }
  row() {
    const row = make("tr");
    for (const column of this.columns) {
      const kinds = ["text", "name", "wide"].filter(kind => column[kind]);
      const cell = make("td", kinds.join(" "));
      cell.dataset.label = column.label;
      row.append(cell);
    }
    return row;
  }
  cell(cell, column, item) {
    if (column.draw) return column.draw(cell, item);
    const value = column.of(item);
    put(cell, column.show ? column.show(value) : String(value));
    if (column.show) cell.classList.toggle("none", !number(value));
  }
}

const vhosts = new Grid(byId("vhosts"), VHOST, 0, false);
const queues = new Grid(byId("queues"), QUEUE, 2, true);
const filter = byId("filter"), choice = byId("sort");
QUEUE.forEach((column, at) => { const option = make("option", "", column.label); option.value = at; choice.append(option); });
choice.addEventListener("change", () => queues.sort(+choice.value, largestFirst(QUEUE[+choice.value])));
filter.addEventListener("input", () => draw());

let latest = null, answered = 0, trouble = "";

function draw() {
  if (!latest) return;
  const node = latest.node || {}, all = [];
  for (const vhost of latest.vhosts) for (const queue of vhost.queues) all.push(Object.assign({vhost: vhost.name}, queue));
  const sum = (items, key) => items.reduce((total, item) => total + number(item[key]), 0);
  facts([["pid", String(node.pid)], ["up", span(node.uptime)], ["memory", bytes(node.memory_bytes)],
         ["durability", String(node.durability)]].concat(node.version ? [["version", String(node.version)]] : []));
  totals([["ready", count(sum(all, "messages_ready"))], ["unacked", count(sum(all, "messages_unacknowledged"))],
          ["in /s", rate(sum(all, "publish_rate"))], ["out /s", rate(sum(all, "deliver_rate"))],
          ["ack /s", rate(sum(all, "ack_rate"))], ["connections", count(sum(latest.vhosts, "connections"))]]);
  const alarms = byId("alarms");
  alarms.replaceChildren(...(node.alarms || []).map(alarm => make("div", "alarm", String(alarm))));
  vhosts.draw(latest.vhosts, vhost => vhost.name);
  const wanted = filter.value.toLowerCase();
  const found = all.filter(queue => (queue.vhost + " " + queue.name).toLowerCase().includes(wanted));
  const drawn = queues.draw(found, queue => JSON.stringify([queue.vhost, queue.name]));
  choice.value = String(queues.sorted);
  put(byId("count"), all.length === 0 ? "no queues yet" : count(drawn) + " of " + count(all.length) + " queues");
}
function facts(pairs) { list(byId("facts"), pairs, "span", (box, [label, value]) => {
  if (!box.firstChild) box.append(make("span"), make("b"));
  put(box.firstChild, label + " "); put(box.lastChild, value);
}); }
function totals(pairs) { list(byId("totals"), pairs, "div", (box, [label, value]) => {
  if (!box.firstChild) { box.className = "card"; box.append(make("span"), make("b")); }
  put(box.firstChild, label); put(box.lastChild, value);
}); }
function list(parent, items, tag, fill) {
  while (parent.children.length > items.length) parent.lastChild.remove();
  items.forEach((item, at) => fill(parent.children[at] || parent.appendChild(make(tag)), item));
}
function pulse() {
  const silent = (Date.now() - answered) / 1000, box = byId("pulse");
  box.className = !answered && !trouble ? "" : trouble ? "bad" : silent > 4 ? "warn" : "good";
  put(box.lastChild, !answered ? trouble || "asking" : trouble ? trouble + ", last answer " + span(silent) + " ago" : "live");
}
async function ask() {
  if (!document.hidden) {
    try {
      const answer = await fetch("/api/status", {cache: "no-store", signal: AbortSignal.timeout(10000)});
      if (!answer.ok) throw new Error("the node answers " + answer.status);
      latest = await answer.json();
      answered = Date.now();
      trouble = "";
      draw();
    } catch (error) {
      trouble = error instanceof TypeError || error.name === "TimeoutError" ? "the node does not answer" : error.message;
    }
    pulse();
  }
  setTimeout(ask, 1000);
}
ask();
"""

_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='4' fill='%232457d6'/%3E"
    "%3Cpath d='M3 5l2 6 3-5 3 5 2-6' fill='none' stroke='white' stroke-width='1.8'/%3E%3C/svg%3E"
)

PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Warren</title>
<link rel="icon" href="{_ICON}">
<style>{STYLE}</style>
</head>
<body>
<header><h1>Warren</h1><div id="facts"></div><div id="pulse"><span class="dot"></span><span>asking</span></div></header>
<div id="alarms" role="alert"></div>
<div id="totals"></div>
<section><div class="scroll"><table id="vhosts"></table></div></section>
<section>
<div class="bar-above">
<h2>Queues</h2>
<div class="legend">
<span title="the head: whole in RAM"><i class="q4"></i>q4</span>
<span title="body on disk"><i class="q3"></i>q3</span>
<span title="on disk, only counted in RAM"><i class="delta"></i>delta</span>
<span title="body on disk"><i class="q2"></i>q2</span>
<span title="the tail: whole in RAM"><i class="q1"></i>q1</span>
</div>
<input id="filter" type="search" placeholder="filter by name" aria-label="filter by name" autocomplete="off">
<label id="sort-label"><select id="sort" aria-label="sort by"></select></label>
</div>
<div class="scroll"><table id="queues"></table></div>
<div id="count"></div>
</section>
<noscript>This page needs JavaScript; <a href="/api/status">/api/status</a> has the same as JSON.</noscript>
<script>{SCRIPT}</script>
</body>
</html>
"""
