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

  // Figures as files: what is on the screen, with its title, legend and the colours it has now written into it.
  const PAINT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin", "opacity", "font-size", "font-weight", "font-family", "text-anchor", "paint-order"];
  const SVG = "http://www.w3.org/2000/svg";
  const painted = (element, copy) => {
    const style = getComputedStyle(element);
    for (const key of PAINT) copy.setAttribute(key, style.getPropertyValue(key));
    for (const key of ["class", "style", "data-tip"]) copy.removeAttribute(key);
    [...element.children].forEach((child, i) => painted(child, copy.children[i]));
  };
  const add = (parent, name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text) made.textContent = text;
    return parent.appendChild(made);
  };
  const standalone = (figure) => {
    const shown = [...figure.querySelectorAll("svg")].find((svg) => svg.getBoundingClientRect().width > 0);
    const box = shown.viewBox.baseVal, style = getComputedStyle(document.body);
    const whole = document.createElementNS(SVG, "svg");
    const text = { "font-family": "sans-serif", fill: style.color };
    const ground = add(whole, "rect", { x: -12, y: -8, fill: getComputedStyle(figure).backgroundColor });
    add(whole, "text", { ...text, x: 0, y: 14, "font-size": 14, "font-weight": 600 }, figure.querySelector("h2").textContent);
    let x = 0, y = 34, top = 30;
    for (const item of figure.querySelectorAll(".legend li")) {
      const needed = 42 + 6.4 * item.textContent.length;
      if (x && x + needed > box.width) { x = 0; y += 20; }
      const mark = getComputedStyle(item.firstChild);
      add(whole, "path", { d: `M${x},${y - 4}h18`, stroke: mark.color, "stroke-width": 2, "stroke-dasharray": { dashed: "6 4", dotted: "2 3" }[mark.borderTopStyle] || "none" });
      add(whole, "text", { ...text, x: x + 25, y, "font-size": 11 }, item.textContent);
      x += needed;
      top = y + 14;
    }
    const copy = shown.cloneNode(true);
    painted(shown, copy);
    add(whole, "g", { transform: `translate(0 ${top})` }).append(...copy.childNodes);
    const size = { width: box.width + 24, height: box.height + top + 16 };
    for (const key in size) { ground.setAttribute(key, size[key]); whole.setAttribute(key, size[key]); }
    whole.setAttribute("viewBox", `-12 -8 ${size.width} ${size.height}`);
    return { text: new XMLSerializer().serializeToString(whole), ...size };
  };
  const save = (href, name) => {
    const link = document.createElement("a");
    link.href = href;
    link.download = name;
    link.click();
  };
  const saveFigure = (figure, kind) => {
    const drawn = standalone(figure), href = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(drawn.text);
    if (kind === "svg") return save(href, figure.id + ".svg");
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas"), scale = 2;
      canvas.width = drawn.width * scale;
      canvas.height = drawn.height * scale;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      save(canvas.toDataURL("image/png"), figure.id + ".png");
    };
    image.src = href;
  };
  for (const figure of document.querySelectorAll("figure")) {
    if (!figure.querySelector("svg")) continue;
    const row = document.createElement("p");
    row.className = "save";
    for (const kind of ["svg", "png"]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = kind.toUpperCase();
      button.title = `Save this figure as ${kind.toUpperCase()}`;
      button.addEventListener("click", () => saveFigure(figure, kind));
      row.append(button);
    }
    figure.append(row);
  }

  // On paper nothing can be unfolded.
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; opened.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => opened.forEach((d) => { d.open = false; }));
  document.documentElement.dataset.ready = "yes";
})();
