"use strict";
(() => {
  const models = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const state = { model: models[0], token: 0, layer: 0, colour: "all" };

  function make(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  }

  const percent = (share) => (share < 9.995 ? (100 * share).toPrecision(share < 0.0995 ? 2 : 3) : Math.round(100 * share)) + " %";
  const shown = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const unitName = (layer, unit) => layer.names.length ? layer.names[unit] : layer.unit + " " + unit;

  // What the colour stands for: what a layer adds, or, where only parts were replaced, what it kept.
  const valuesOf = (layer) => layer.added.length ? layer.added : layer.kept;

  function depths() {
    const { layers, tokens } = state.model;
    const chosen = state.colour === "all" ? layers : [layers[Number(state.colour)]];
    const sums = tokens.map((_, token) => chosen.reduce((sum, layer) => sum + (valuesOf(layer)[token] || 0), 0));
    const order = [...sums].sort((a, b) => a - b);
    // By rank: a first token that is far above all others would leave no colour for them.
    return sums.map((value) => order.indexOf(value) / Math.max(1, order.length - 1));
  }

  function drawPassage() {
    const depth = depths();
    const buttons = state.model.tokens.map((token, number) => {
      const button = make("button", shown(token) || "∅");
      button.setAttribute("role", "option");
      button.setAttribute("aria-selected", String(number === state.token));
      button.tabIndex = number === state.token ? 0 : -1;
      button.style.setProperty("--depth", (0.45 * depth[number]).toFixed(2));
      button.title = "token " + (number + 1) + " of " + state.model.tokens.length;
      button.addEventListener("click", () => choose(number));
      return button;
    });
    const parts = buttons.flatMap((button, number) =>
      state.model.tokens[number].includes("\n") ? [button, make("br")] : [button]);
    at("passage").replaceChildren(...parts);
  }

  const buttonsOfTokens = () => at("passage").querySelectorAll("button");

  function choose(token) {
    const last = state.model.tokens.length - 1;
    state.token = Math.min(last, Math.max(0, token));
    buttonsOfTokens().forEach((button, number) => {
      button.setAttribute("aria-selected", String(number === state.token));
      button.tabIndex = number === state.token ? 0 : -1;
    });
    drawToken();
  }

  function pairs(flat) {
    const found = [];
    for (let i = 0; i < (flat || []).length; i += 2) {
      const ran = flat[i] >= 0;
      found.push({ unit: ran ? flat[i] : -1 - flat[i], ran, share: flat[i + 1] / 1000 });
    }
    return found;
  }

  function strongest(layer) {
    const ran = pairs(layer.units[state.token]).filter((one) => one.ran).slice(0, 3);
    return ran.map((one) => one.unit + " (" + percent(one.share) + ")").join(", ");
  }

  function readsLeast(layer) {
    const parts = pairs(layer.units[state.token]).sort((a, b) => a.share - b.share).slice(0, 3);
    return parts.map((one) => unitName(layer, one.unit).split(".").pop() + " (" + percent(one.share) + ")").join(", ");
  }

  function columns() {
    const first = state.model.layers[0];
    const found = [];
    if (first.added.length) found.push(["adds", (layer) => percent(layer.added[state.token])]);
    if (first.unit && !first.names.length) found.push(["ran", (layer) => layer.ran[state.token] + " of " + layer.count]);
    if (first.unit) {
      found.push(["kept", (layer) => percent(layer.kept[state.token])]);
      found.push(first.names.length ? ["read least by", readsLeast] : ["strongest " + first.unit + "s", strongest]);
    }
    return found;
  }

  function drawToken() {
    const { tokens, layers } = state.model;
    at("chosen").textContent = "Token " + (state.token + 1) + ": “" + shown(tokens[state.token]).trim() + "”";
    const kinds = columns();
    const head = make("tr");
    head.append(make("th", "layer"), ...kinds.map(([name]) => make("th", name)));
    const rows = layers.map((layer, number) => {
      const row = make("tr");
      row.setAttribute("aria-current", String(number === state.layer));
      const button = make("button", String(layer.layer));
      button.setAttribute("aria-label", "layer " + layer.layer);
      button.addEventListener("click", () => chooseLayer(number));
      const cell = make("th");
      cell.append(button);
      row.append(cell, ...kinds.map(([, words]) => make("td", words(layer))));
      return row;
    });
    const thead = make("thead");
    thead.append(head);
    const body = make("tbody");
    body.append(...rows);
    at("by-layer").replaceChildren(thead, body);
    at("columns-note").textContent = columnsNote(layers[0]);
    drawUnits();
  }

  function columnsNote(layer) {
    const words = [];
    if (layer.added.length) words.push("adds: norm of what the converted part adds, over that of the residual stream before the layer; far above 100 % where the stream is small, as in the first layer.");
    if (layer.unit && !layer.names.length) {
      words.push("kept: share of the output energy of all " + layer.unit + "s in those that ran.");
    }
    if (layer.names.length) words.push("kept: share of the energy of all inputs in those that were read, mean over linear layers.");
    return words.join(" ");
  }

  function chooseLayer(number) {
    state.layer = number;
    [...at("by-layer").tBodies[0].rows].forEach((row, place) => row.setAttribute("aria-current", String(place === number)));
    drawUnits();
  }

  function bar(share, longest) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 100 10");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const rect = document.createElementNS(space, "rect");
    rect.setAttribute("width", (100 * share / longest).toFixed(2));
    rect.setAttribute("height", "10");
    svg.append(rect);
    return svg;
  }

  function drawUnits() {
    const layer = state.model.layers[state.layer];
    const units = pairs(layer.units[state.token]);
    at("chosen-layer").textContent = "Layer " + layer.layer;
    const longest = Math.max(0.001, ...units.map((one) => one.share));
    const rows = units.map((one) => {
      const row = make("tr", undefined, one.ran ? "own" : "skipped");
      const cell = make("td", undefined, "track");
      cell.append(bar(one.share, longest));
      const name = unitName(layer, one.unit) + (one.ran ? "" : ", skipped");
      row.title = name + ": " + percent(one.share);
      row.append(make("th", name), cell, make("td", percent(one.share), "value"));
      return row;
    });
    at("by-unit").replaceChildren(...rows);
    at("unit-note").textContent = note(layer, units.length);
  }

  function note(layer, listed) {
    if (!layer.unit) return "Nothing is chosen token by token here.";
    if (layer.names.length) return "Share of its inputs that each linear layer read for this token.";
    const rest = layer.count - listed;
    const others = rest > 0 ? " The " + listed + " strongest of " + layer.count + " are listed." : "";
    return "Norm of what each " + layer.unit + " adds, over the norm of the residual stream before the layer. Dashed: "
      + "skipped, with what it would have added." + others;
  }

  function fill(select, names) {
    select.replaceChildren(...names.map(([value, name]) => {
      const option = make("option", name);
      option.value = value;
      return option;
    }));
  }

  function drawModel() {
    const { layers } = state.model;
    state.layer = Math.min(state.layer, layers.length - 1);
    state.colour = "all";
    fill(at("layer"), [["all", "all"], ...layers.map((layer, number) => [String(number), String(layer.layer)])]);
    at("meaning").textContent = layers[0].added.length
      ? "The darker a token, the more the converted layers add to it, as a share of the residual stream."
      : "The darker a token, the larger the share of the output energy that was kept.";
    drawPassage();
    choose(state.token);
  }

  at("passage").addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    choose(state.token + steps[event.key]);
    buttonsOfTokens()[state.token].focus();
  });
  at("layer").addEventListener("change", (event) => {
    state.colour = event.target.value;
    drawPassage();
    if (state.colour !== "all") chooseLayer(Number(state.colour));
  });
  at("which").addEventListener("change", (event) => {
    state.model = models[Number(event.target.value)];
    drawModel();
  });
  fill(at("which"), models.map((model, number) => [String(number), model.name]));
  at("which-label").hidden = models.length < 2;
  at("view").hidden = false;
  state.token = Math.min(4, state.model.tokens.length - 1);
  drawModel();
})();
