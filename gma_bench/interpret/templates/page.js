"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const MOST_CONTEXTS = 14, BEFORE = 10, AFTER = 12;
  const state = { layer: 0, head: 0, component: 0, token: 0 };
  const unpacked = new Map();

  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text; // never as HTML: tokens are data
    return node;
  };
  const percent = (x) => `${(100 * x).toFixed(x < 0.0995 ? 2 : 1)} %`;
  const signs = (s) => s.replace(/\n/g, "↵\n").replace(/\t/g, "⇥");
  const oneLine = (s) => s.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  const word = (i) => data.words[data.text[i]];
  const count = data.text.length;

  function unpack(base64) {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const values = new Uint16Array(bytes.length / 2);
    for (let i = 0; i < values.length; i++) values[i] = bytes[2 * i] | (bytes[2 * i + 1] << 8);
    return values;
  }
  function current() {
    const key = `${state.layer}/${state.head}`;
    if (!unpacked.has(key)) {
      const layer = data.layers[state.layer], head = layer.heads[state.head];
      unpacked.set(key, {
        ...head, K: layer.K, top: layer.top,
        leading: unpack(head.components), share: unpack(head.responsibilities),
      });
    }
    return unpacked.get(key);
  }
  const shareOf = (head, token, component) => {
    for (let t = token * head.top; t < (token + 1) * head.top; t++)
      if (head.leading[t] === component) return head.share[t] / 65535;
    return 0;
  };
  const mostly = (head, k) => {
    if (!data.categories.length) return "";
    if (!head.won[k]) return "no token";
    const counts = head.counts[k], best = counts.indexOf(Math.max(...counts));
    return data.categories[best];
  };

  function meter(share, scale, text) {
    const bar = make("span", "meter"), fill = make("i");
    fill.style.width = `${Math.max(0, Math.min(1, share / scale)) * 70}%`;
    bar.append(fill, make("b", "", text));
    return bar;
  }

  // ---- the list of components ----
  function drawList() {
    const head = current(), list = $("components"), most = Math.max(...head.usage);
    const order = [...Array(head.K).keys()], by = $("order").value;
    if (by !== "number") order.sort((a, b) => head.usage[b] - head.usage[a]);
    if (by === "category") {
      const rank = (k) => (head.won[k] ? data.categories.indexOf(mostly(head, k)) : data.categories.length);
      order.sort((a, b) => rank(a) - rank(b) || head.usage[b] - head.usage[a]);
    }
    list.replaceChildren(...order.map((k) => {
      const row = make("div", "row option");
      row.setAttribute("role", "option");
      row.id = `component-${k}`;
      row.dataset.component = k;
      row.tabIndex = -1;
      row.setAttribute("aria-label", `component ${k}, ${percent(head.usage[k])}, ${mostly(head, k)}`);
      row.append(make("span", "", k), meter(head.usage[k], most, percent(head.usage[k])), make("span", "most", mostly(head, k)));
      return row;
    }));
    return order;
  }
  function choose(component, focus) {
    state.component = component;
    for (const row of $("components").children) {
      const on = Number(row.dataset.component) === component;
      row.setAttribute("aria-selected", on);
      row.tabIndex = on ? 0 : -1;
      if (on && focus) row.focus({ preventScroll: true });
      if (on) {
        const list = $("components"), top = row.offsetTop - list.offsetTop;
        if (top < list.scrollTop) list.scrollTop = top;
        if (top + row.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top + row.offsetHeight - list.clientHeight;
      }
    }
    drawPanel();
    shade();
    remember();
  }
  $("components").addEventListener("click", (event) => {
    const row = event.target.closest(".option");
    if (row) choose(Number(row.dataset.component), true);
  });
  $("components").addEventListener("keydown", (event) => {
    const rows = [...$("components").children];
    const at = rows.findIndex((row) => Number(row.dataset.component) === state.component);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + 10, PageUp: at - 10 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(Number(rows[Math.max(0, Math.min(rows.length - 1, to))].dataset.component), true);
  });

  // ---- one component ----
  function topTokens(head, component) {
    const found = [];
    for (let i = 0; i < count; i++) {
      const share = shareOf(head, i, component);
      if (share > 0) found.push([share, i]);
    }
    return found.sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, MOST_CONTEXTS);
  }
  function context(token) {
    const line = make("span", "kwic"), left = make("span", "left"), inner = make("bdi");
    let before = "", after = "";
    for (let i = Math.max(0, token - BEFORE); i < token; i++) before += word(i);
    for (let i = token + 1; i < Math.min(count, token + AFTER); i++) after += word(i);
    inner.textContent = oneLine(before);
    inner.dir = "ltr";
    left.append(inner);
    line.append(left, make("mark", "", oneLine(word(token))), make("span", "right", oneLine(after)));
    return line;
  }
  function drawPanel() {
    const head = current(), k = state.component, panel = $("panel");
    const won = head.won.reduce((a, b) => a + b, 0);
    const title = make("h3", "", `Component ${k}`);
    const facts = make("p", "facts",
      `Mean responsibility ${percent(head.usage[k])} (even use: ${percent(1 / head.K)}), prior ${percent(head.prior[k])}. ` +
      `Wins ${head.won[k].toLocaleString("en")} of ${won.toLocaleString("en")} tokens.`);
    panel.replaceChildren(title, facts);
    if (head.won[k] && data.categories.length) {
      const shares = make("ul", "shares");
      data.categories.forEach((name, c) => {
        if (!head.counts[k][c]) return;
        const item = make("li"), share = head.counts[k][c] / head.won[k];
        item.append(make("span", "", name), meter(share, 1, percent(share)));
        shares.append(item);
      });
      panel.append(shares);
    }
    const top = topTokens(head, k);
    if (!top.length) {
      panel.append(make("p", "hint", "It is among the leading components of no token in the text below."));
      return;
    }
    panel.append(make("p", "hint", "Tokens below with its largest responsibility:"));
    const contexts = make("ol", "contexts");
    for (const [share, token] of top) {
      const item = make("li"), button = make("button");
      button.type = "button";
      button.setAttribute("aria-label", `${oneLine(word(token))}, ${share.toFixed(3)}; show in the text`);
      button.append(context(token));
      button.addEventListener("click", () => look(token, true));
      item.append(make("span", "value", share.toFixed(3)), button);
      contexts.append(item);
    }
    panel.append(contexts);
  }

  // ---- the text ----
  const tokens = [];
  function drawText() {
    const starts = new Set(data.starts), parts = document.createDocumentFragment();
    for (let i = 0; i < count; i++) {
      if (starts.has(i)) parts.append(make("hr"));
      const token = make("span", "token", signs(word(i)));
      token.dataset.token = i;
      token.tabIndex = i ? -1 : 0;
      tokens.push(token);
      parts.append(token);
    }
    $("text").replaceChildren(parts);
  }
  function shade() {
    const head = current(), shares = tokens.map((_, i) => shareOf(head, i, state.component));
    const most = Math.max(...shares);
    tokens.forEach((token, i) => {
      token.style.setProperty("--share", `${shares[i] ? (data.shade * (0.15 + 0.85 * (shares[i] / most) ** 2)).toFixed(1) : 0}%`);
    });
    $("shade").textContent = most ? `Shade: responsibility of component ${state.component}, at most ${most.toFixed(3)} here.`
      : `Component ${state.component} is among the leading ones of no token here.`;
  }
  function look(token, focus) {
    tokens[state.token].classList.remove("on");
    tokens[state.token].tabIndex = -1;
    state.token = token;
    tokens[token].classList.add("on");
    tokens[token].tabIndex = 0;
    if (focus) {
      tokens[token].focus({ preventScroll: true });
      const text = $("text"), top = tokens[token].offsetTop - text.offsetTop;
      if (top < text.scrollTop + 20 || top > text.scrollTop + text.clientHeight - 60) text.scrollTop = top - text.clientHeight / 2;
    }
    drawPosterior();
  }
  function drawPosterior() {
    const head = current(), panel = $("posterior"), start = state.token * head.top;
    const title = make("h3", "", "Posterior of ");
    title.append(make("mark", "quoted", `“${oneLine(word(state.token)).trim() || "␣"}”`));
    const category = data.category[state.token] < 0 ? "" : data.categories[data.category[state.token]];
    const list = make("ol", "posterior");
    let rest = 1;
    for (let t = start; t < start + head.top; t++) {
      const k = head.leading[t], share = head.share[t] / 65535;
      rest -= share;
      const item = make("li"), button = make("button");
      button.type = "button";
      button.setAttribute("aria-label", `component ${k}, ${share.toFixed(3)}; show it`);
      button.append(make("span", "", k), meter(share, head.share[start] / 65535, share.toFixed(3)));
      button.addEventListener("click", () => choose(k, false));
      item.append(button);
      list.append(item);
    }
    const others = head.K - head.top;
    panel.replaceChildren(title, make("p", "hint", category), list);
    if (others > 0) panel.append(make("p", "hint", `${Math.max(0, rest).toFixed(3)} on the ${others} others`));
  }
  $("text").addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (token) look(Number(token.dataset.token), false);
  });
  $("text").addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token) look(Number(token.dataset.token), true);
  });
  $("text").addEventListener("focusin", (event) => {
    const token = event.target.closest(".token");
    if (token) look(Number(token.dataset.token), false);
  });
  $("text").addEventListener("keydown", (event) => {
    const at = state.token;
    let to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: count - 1 }[event.key];
    if (event.key === "ArrowDown" || event.key === "ArrowUp") to = lineAway(at, event.key === "ArrowDown" ? 1 : -1);
    if (event.key === "Enter") to = at, choose(current().leading[at * current().top], false);
    if (to === undefined) return;
    event.preventDefault();
    look(Math.max(0, Math.min(count - 1, to)), true);
  });
  function lineAway(from, step) {
    const here = tokens[from].getBoundingClientRect();
    let line = null, best = from, distance = Infinity;
    for (let i = from + step; i >= 0 && i < count; i += step) {
      const box = tokens[i].getBoundingClientRect();
      if (Math.abs(box.top - here.top) < 4) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) > 4) break;
      const away = Math.abs(box.left - here.left);
      if (away < distance) { distance = away; best = i; }
    }
    return best;
  }

  // ---- layer, head, address ----
  function options(select, n, name) {
    select.replaceChildren(...Array.from({ length: n }, (_, i) => {
      const option = make("option", "", name ? `${i}` : i);
      option.value = i;
      return option;
    }));
  }
  function show(component) {
    options($("head"), data.layers[state.layer].heads.length);
    state.head = Math.min(state.head, data.layers[state.layer].heads.length - 1);
    $("layer").value = state.layer;
    $("head").value = state.head;
    const order = drawList();
    choose(component !== undefined && component < current().K ? component : order[0], false);
    drawPosterior();
  }
  function remember() {
    try { history.replaceState(null, "", `#l${state.layer}h${state.head}c${state.component}`); } catch { /* some viewers refuse */ }
  }
  $("layer").addEventListener("change", (event) => { state.layer = Number(event.target.value); show(); });
  $("head").addEventListener("change", (event) => { state.head = Number(event.target.value); show(); });
  $("order").addEventListener("change", () => show(state.component));
  const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const named = () => { $("theme").textContent = isDark() ? "Light" : "Dark"; $("theme").setAttribute("aria-pressed", isDark()); };
  $("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; named(); });
  dark.addEventListener("change", named);
  named();

  options($("layer"), data.layers.length);
  drawText();
  tokens[0].classList.add("on");
  const wanted = /^#l(\d+)h(\d+)c(\d+)$/.exec(location.hash);
  if (wanted && data.layers[wanted[1]] && data.layers[wanted[1]].heads[wanted[2]]) {
    state.layer = Number(wanted[1]);
    state.head = Number(wanted[2]);
    show(Number(wanted[3]));
  } else show();
})();
