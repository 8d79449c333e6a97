"use strict";
(() => {
  const one = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const { ops, edges } = JSON.parse(one("#data").textContent);
  const body = document.body, root = document.documentElement;
  const detail = one("#detail"), heading = one("#detail-h"), content = one("#detail-body");
  const rows = all("#ops tbody tr"), nodes = all(".k");
  const nodeOf = new Map(nodes.map(node => [+node.dataset.i, node]));
  const rowOf = new Map(rows.map(row => [+row.dataset.i, row]));
  let opener = null;

  const make = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const draw = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = value => String(+value.toPrecision(3)).replace("-", "−");

  // -- colours and theme
  const colour = mode => {
    body.dataset.mode = mode;
    one(`input[name=mode][value=${mode}]`).checked = true;
  };
  one("#modes").addEventListener("change", event => colour(event.target.value));
  colour("e");
  const themes = { auto: "automatic", light: "light", dark: "dark" }, order = Object.keys(themes);
  const theme = name => {
    root.dataset.theme = name;
    one("#theme").textContent = `Theme: ${themes[name]}`;
  };
  one("#theme").addEventListener("click", () => theme(order[(order.indexOf(root.dataset.theme) + 1) % 3]));
  one("#print").addEventListener("click", () => window.print());

  // -- details
  const histogram = ([start, width, counts, low, high]) => {
    const [w, h] = [420, 130], end = start + width * counts.length, most = Math.log1p(Math.max(...counts));
    const left = low === null ? start : Math.min(start, low), right = high === null ? end : Math.max(end, high);
    const x = value => 4 + (value - left) / (right - left || 1) * (w - 8);
    const total = counts.reduce((a, b) => a + b, 0);
    const range = low === null ? "it is not quantized here" : `range ${short(low)} to ${short(high)}`;
    const label = `Histogram of ${total.toLocaleString("en")} values from ${short(start)} to ${short(end)}; ${range}`;
    const svg = draw("svg", { viewBox: `0 0 ${w} ${h + 18}`, role: "img", "aria-label": label });
    counts.forEach((count, i) => {
      const tall = most ? Math.log1p(count) / most * (h - 10) : 0;
      const from = x(start + width * i);
      if (count) svg.append(draw("rect", { class: "b", x: from, y: h - tall, width: Math.max(x(start + width * (i + 1)) - from - .5, .8), height: tall }));
    });
    if (low !== null) {
      for (const [from, to] of [[left, low], [high, right]]) {
        if (to > from) svg.append(draw("rect", { class: "c", x: x(from), y: 0, width: x(to) - x(from), height: h }));
      }
      for (const end of [low, high]) svg.append(draw("path", { class: "l", d: `M${x(end)} 0V${h}` }));
    }
    svg.append(draw("path", { class: "x", d: `M0 ${h}H${w}` }));
    svg.append(draw("text", { x: 4, y: h + 13 }, short(left)), draw("text", { x: w - 4, y: h + 13, "text-anchor": "end" }, short(right)));
    const taken = [x(left), x(right)];
    for (const value of low === null ? [0] : [low, high, 0]) {
      if (value <= left || value >= right || taken.some(at => Math.abs(at - x(value)) < 50)) continue;
      svg.append(draw("text", { x: x(value), y: h + 13, "text-anchor": "middle" }, short(value)));
      taken.push(x(value));
    }
    return svg;
  };
  const weights = ({ m: largest, d: decibels, s: said }) => {
    const [w, h] = [420, 110], step = w / largest.length;
    const svg = draw("svg", { viewBox: `0 0 ${w} ${h + 2}`, role: "img", "aria-label": said });
    largest.forEach((value, i) => svg.append(draw("rect", { class: "b", x: i * step, y: h - value * h / 100, width: Math.max(step - .6, .6), height: value * h / 100 })));
    const top = Math.max(60, ...decibels), at = (value, i) => `${(i + .5) * step} ${h - Math.max(value, 0) / top * h}`;
    svg.append(draw("path", { class: "d", d: "M" + decibels.map(at).join("L") }));
    return svg;
  };
  const show = (index, from) => {
    const found = ops[index];
    opener = from || opener;
    heading.textContent = found.n;
    content.replaceChildren();
    const values = "values of the float model (counts on a logarithmic scale)";
    if (found.h) content.append(make("h3", `Its result: ${values}`), histogram(found.h));
    const last = ops[found.r];
    if (last && last.h) content.append(make("h3", `Result of its kernel, ${last.n}: ${values}`), histogram(last.h));
    if (found.w) content.append(make("h3", "Weights by output channel: largest magnitude, and decibels as a line"), weights(found.w), make("p", found.w.s, { class: "muted" }));
    content.append(make("h3", "Facts"));
    const list = make("dl");
    for (const [label, text] of found.l) list.append(make("dt", label), make("dd", text));
    content.append(list);
    detail.hidden = false;
    const main = found.k;
    all(".on, .near").forEach(element => element.classList.remove("on", "near"));
    if (nodeOf.has(main)) nodeOf.get(main).classList.add("on");
    for (const [a, b] of edges) {
      if (a === main && nodeOf.has(b)) nodeOf.get(b).classList.add("near");
      if (b === main && nodeOf.has(a)) nodeOf.get(a).classList.add("near");
    }
    rowOf.get(index).classList.add("on");
    if (nodeOf.has(main)) focusable(nodeOf.get(main));
    if (from) heading.focus();
    history.replaceState(null, "", `#op${index}`);
  };
  const hide = () => {
    detail.hidden = true;
    all(".on, .near").forEach(element => element.classList.remove("on", "near"));
    if (opener) opener.focus();
    opener = null;
  };
  one("#close").addEventListener("click", hide);
  one("#ops tbody").addEventListener("click", event => {
    const row = event.target.closest("tr");
    show(+row.dataset.i, one(".open", row));
  });

  // -- network
  const focusable = node => nodes.forEach(other => other.setAttribute("tabindex", other === node ? "0" : "-1"));
  if (nodes.length) focusable(nodes[0]);
  const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  for (const net of all(".net")) {
    net.addEventListener("click", event => {
      const node = event.target.closest(".k");
      if (node) show(+node.dataset.i, node);
    });
    net.addEventListener("keydown", event => {
      const at = nodes.indexOf(event.target.closest(".k"));
      if (at < 0) return;
      if (event.key === "Enter" || event.key === " ") show(+nodes[at].dataset.i, nodes[at]);
      else if (event.key === "Home" || event.key === "End" || event.key in moves) {
        const next = event.key === "Home" ? 0 : event.key === "End" ? nodes.length - 1 : at + moves[event.key];
        const node = nodes[Math.min(Math.max(next, 0), nodes.length - 1)];
        focusable(node);
        node.focus();
      } else return;
      event.preventDefault();
    });
  }
  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && !detail.hidden) hide();
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "radio") return;
    if ("eatp".includes(event.key) && one(`input[name=mode][value="${event.key}"]`)) colour(event.key);
  });

  // -- table
  const heads = all("#ops thead th"), table = one("#ops tbody");
  const value = (row, column) => {
    const found = row.cells[column].dataset.v;
    return found === undefined ? null : isNaN(+found) ? found : +found;
  };
  heads.forEach((head, column) => one("button", head).addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const keyed = rows.map(row => [value(row, column), row]);
    keyed.sort(([a], [b]) => a === b ? 0 : a === null ? 1 : b === null ? -1 : (a < b ? -1 : 1) * sign);
    table.append(...keyed.map(([, row]) => row));
  }));
  const search = one("#search"), filter = one("#filter");
  const select = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = (row.cells[0].textContent + " " + ops[row.dataset.i].t).toLowerCase();
      row.hidden = !(words.every(word => text.includes(word)) && (!filter.value || row.dataset.p === filter.value));
      count += !row.hidden;
    }
    one("#count").textContent = count === rows.length ? `${count} operators` : `${count} of ${rows.length} operators`;
  };
  search.addEventListener("input", select);
  filter.addEventListener("change", select);
  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.dataset.copy);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(button.previousElementSibling);
        button.textContent = "Selected";
      }
    });
  }
  const follow = () => {
    const asked = /^#op(\d+)$/.exec(location.hash);
    if (asked && rowOf.has(+asked[1])) show(+asked[1]);
  };
  addEventListener("hashchange", follow);
  follow();
})();
