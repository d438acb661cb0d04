"use strict";
(() => {
  const tip = document.getElementById("tip");
  const hide = () => {
    tip.hidden = true;
    document.querySelectorAll(".here").forEach((e) => e.classList.remove("here"));
    document.querySelectorAll(".cursor").forEach((e) => { e.setAttribute("width", 0); e.setAttribute("height", 0); });
  };
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x - box.width / 2, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y - box.height - 14 > 0 ? y - box.height - 14 : y + 18) + "px";
  };

  // Charts: the mark under the pointer, or the nearest one within a finger's width.
  const nearest = (svg, x, y) => {
    let best = null, least = 28 * 28;
    for (const mark of svg.querySelectorAll("[data-tip]")) {
      const box = mark.getBoundingClientRect();
      const dx = Math.max(box.left - x, 0, x - box.right), dy = Math.max(box.top - y, 0, y - box.bottom);
      const away = dx * dx + dy * dy;
      if (away < least) { least = away; best = mark; }
    }
    return best;
  };
  const overChart = (svg, event) => {
    const mark = nearest(svg, event.clientX, event.clientY);
    hide();
    if (!mark) return;
    if (mark.classList.contains("point")) mark.classList.add("here");
    const box = mark.getBoundingClientRect();
    show(mark.dataset.tip, box.left + Math.min(box.width / 2, 60), box.top);
  };

  // The heat map: which tensor of which plan is under the pointer.
  const overCells = (svg, cells, event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const edges = svg.dataset.edges.split(" ").map(Number), top = +svg.dataset.top, row = +svg.dataset.row;
    const tensor = Math.floor((y - top) / row);
    const plan = edges.findIndex((edge, i) => i + 1 < edges.length && x >= edge && x < edges[i + 1]);
    hide();
    if (plan < 0 || tensor < 0 || tensor >= cells.names.length) return;
    const column = cells.plans[plan], score = cells.scores[column.scores][tensor];
    const cursor = svg.querySelector(".cursor");
    const place = { x: edges[plan], y: top + row * tensor, width: edges[plan + 1] - edges[plan], height: row };
    for (const key in place) cursor.setAttribute(key, place[key]);
    const does = column.trains[tensor] === "1" ? "trains" : "rests";
    show(`${cells.names[tensor]}\n${does}${score === null ? "" : `, score ${score}`}\n${column.title}`, event.clientX, event.clientY);
  };

  for (const svg of document.querySelectorAll("svg")) {
    const block = svg.closest("figure").querySelector("script.cells");
    const cells = block ? JSON.parse(block.textContent) : null;
    const over = svg.classList.contains("heatmap") && cells ? (e) => overCells(svg, cells, e) : (e) => overChart(svg, e);
    svg.addEventListener("pointermove", over);
    svg.addEventListener("pointerdown", over);
    svg.addEventListener("pointerleave", hide);
  }
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // Tables: a click on a heading sorts by it, numbers as numbers; what has no value stays at the end.
  const sort = (heading) => {
    const row = heading.parentNode, at = [...row.children].indexOf(heading);
    const numeric = heading.classList.contains("number");
    const descending = heading.getAttribute("aria-sort") === (numeric ? "descending" : "ascending") ? !numeric : numeric;
    const body = heading.closest("table").tBodies[0];
    const value = (tr) => tr.children[at].dataset.value;
    const rows = [...body.rows].sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = numeric ? x - y : x.localeCompare(y, undefined, { numeric: true });
      return descending ? -order : order;
    });
    body.append(...rows);
    for (const other of row.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  };
  for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sort(button.parentNode));

  // A spreadsheet takes text that begins like a formula for one; the apostrophe keeps it text.
  const field = (text, numeric) => {
    const safe = !numeric && /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const csv = (table) => {
    const headings = [...table.tHead.rows[0].children];
    const lines = [headings.map((h) => field(h.textContent, false))];
    for (const row of table.tBodies[0].rows) {
      lines.push([...row.children].map((td, i) => field(td.dataset.value, headings[i].classList.contains("number"))));
    }
    return lines.map((line) => line.join(",") + "\r\n").join("");
  };
  for (const button of document.querySelectorAll(".csv")) {
    button.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csv(button.parentNode.querySelector("table"))], { type: "text/csv" }));
      link.download = button.dataset.name + ".csv";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  // On paper nothing can be unfolded.
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; opened.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => opened.forEach((d) => { d.open = false; }));
  document.documentElement.dataset.ready = "yes";
})();
