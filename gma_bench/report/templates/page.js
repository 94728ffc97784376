"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Theme: the system's until the reader chooses. Storage may be refused for files; then it is not kept.
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("gma-bench-theme"); } catch { return null; } };
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const name = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-pressed", String(dark())); };
  const kept = stored();
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("gma-bench-theme", root.dataset.theme); } catch { /* not kept */ }
    name();
  });
  system.addEventListener("change", name);
  name();

  // Sorting: numbers by value, names by letter; what has no value stays last.
  for (const table of all("main table")) {
    const body = table.tBodies[0];
    const heads = all("thead th", table);
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const first = head.classList.contains("num") ? "descending" : "ascending";
      const second = first === "descending" ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => {
        const text = row.cells[column].dataset.value;
        return text === undefined ? null : column ? Number(text) : text;
      };
      [...body.rows].sort((a, b) => {
        const x = value(a), y = value(b);
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (column ? x - y : x.localeCompare(y));
      }).forEach((row) => body.append(row));
    }));
  }

  // Values of a chart at the x nearest to the pointer, or at the one that the arrow keys reached.
  for (const chart of all("[data-chart]")) {
    const svg = chart.querySelector(":scope > svg");
    const tip = chart.querySelector(".tip");
    const cursor = chart.querySelector(".cursor");
    const data = JSON.parse(chart.querySelector("script").textContent);
    const xs = [...new Set(data.series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
    let chosen = null, at = -1;
    const hide = () => { tip.hidden = true; cursor.setAttribute("hidden", ""); at = -1; };
    const show = (index) => {
      at = index;
      const x = xs[index];
      cursor.removeAttribute("hidden");
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      const here = data.series.filter((s) => !chosen || s.group === chosen)
        .map((s) => [s, s.points.find((p) => p[0] === x)]).filter(([, p]) => p)
        .sort((a, b) => a[1][1] - b[1][1]);
      tip.replaceChildren();
      const title = document.createElement("b");
      title.textContent = `${data.x} ${here.length ? here[0][1][2] : ""}`;
      const rows = document.createElement("table");
      for (const [series, point] of here) {
        const row = rows.insertRow();
        const label = row.insertCell();
        label.textContent = series.name;
        label.className = `s${series.slot % 8}`;
        row.insertCell().textContent = point[3];
      }
      tip.append(title, rows);
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), frame = chart.getBoundingClientRect();
      const scale = box.width / svg.viewBox.baseVal.width;
      const left = x * scale + 12, room = chart.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, left <= room ? left : Math.min(room, x * scale - tip.offsetWidth - 12))}px`;
      // On a phone the values would cover the curves: they go below them.
      tip.style.top = `${(frame.width < 420 ? box.bottom : box.top) - frame.top + 8}px`;
    };
    const nearest = (x) => xs.reduce((best, v, i) => Math.abs(v - x) < Math.abs(xs[best] - x) ? i : best, 0);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      show(nearest((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width));
    });
    svg.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("focus", () => { if (chart.matches(":focus-visible")) show(0); });
    chart.addEventListener("keydown", (event) => {
      if (event.target !== chart) return;
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) { event.preventDefault(); show(Math.min(xs.length - 1, Math.max(0, at + step))); }
      if (event.key === "Escape") hide();
    });
    const buttons = all(".legend button", chart);
    buttons.forEach((button) => button.addEventListener("click", () => {
      chosen = chosen === button.dataset.group ? null : button.dataset.group;
      chart.classList.toggle("focus", chosen !== null);
      buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.group === chosen)));
      all(":scope > svg .series", chart).forEach((g) => g.classList.toggle("on", g.dataset.group === chosen));
    }));
  }

  // The runs behind a figure are copies of their entries under "Runs".
  const dialog = document.getElementById("behind");
  const body = dialog.querySelector(".body");
  document.addEventListener("click", (event) => {
    const figure = event.target.closest(".figure");
    if (figure) {
      body.replaceChildren(...figure.dataset.runs.split(" ").map((id) => {
        const copy = document.getElementById(`run-${id}`).cloneNode(true);
        copy.removeAttribute("id");
        copy.open = true;
        return copy;
      }));
      dialog.showModal();
      dialog.scrollTop = 0;
    }
    if (event.target === dialog || event.target.closest(".close")) dialog.close();
    const copy = event.target.closest(".copy");
    if (copy) {
      const text = copy.previousElementSibling.textContent;
      const done = (word) => { copy.textContent = word; setTimeout(() => { copy.textContent = "Copy"; }, 1500); };
      const select = () => { getSelection().selectAllChildren(copy.previousElementSibling); done("Selected"); };
      if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => done("Copied"), select);
      else select();
    }
  });

  const open = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  addEventListener("hashchange", open);
  open();

  // On paper there is nothing to click: verdicts show how they came about.
  let closed = [];
  addEventListener("beforeprint", () => { closed = all(".why:not([open])"); closed.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => closed.forEach((d) => { d.open = false; }));
})();
