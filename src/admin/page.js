"use strict";
(() => {
  const EVERY = 2000, PATIENCE = 5000, NONE = "–";
  const whole = (value) => Math.round(value).toLocaleString("en-US");
  const rate = (value) => value < 10 ? value.toFixed(1) : whole(value);
  const bytes = (value) => {
    const units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if (value < 1024) return `${Math.round(value)} B`;
    let at = -1;
    while (value >= 1024 && at + 1 < units.length) { value /= 1024; at += 1; }
    return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
  };
  const seconds = (value) => {
    if (value <= 0) return "0 s";
    if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.01 ? 2 : 1)} ms`;
    if (value < 1) return `${Math.round(value * 1000)} ms`;
    if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
    const left = Math.floor(value);
    if (left < 3600) return `${Math.floor(left / 60)} min ${left % 60} s`;
    if (left < 86400) return `${Math.floor(left / 3600)} h ${Math.floor(left % 3600 / 60)} min`;
    return `${Math.floor(left / 86400)} d ${Math.floor(left % 86400 / 3600)} h`;
  };
  const WORDS = {
    ok: "The server keeps what the relay still needs",
    danger: "In danger: little is left before the server gives it up",
    lost: "Lost: the server has removed log that the slot still needed",
    unknown: "Not known: nobody looks at it at present",
  };
  const tops = (values) => values.length ? Math.max(...values) : 0;
  // What is absent has a form of its own, never that of 0.
  const FORMS = {
    text: (value) => value ?? NONE,
    count: (value) => value === null ? NONE : whole(value),
    rate: (value) => value === null ? NONE : rate(value),
    bytes: (value) => value === null ? NONE : bytes(value),
    limit: (bound) => !bound?.known ? NONE : bound.limit_bytes === null ? "none" : bytes(bound.limit_bytes),
    seconds: (value) => value === null ? NONE : seconds(value),
    time: (value) => value === null ? NONE : value.slice(0, 19).replace("T", " "),
    lasting: (value) => value === null ? "lasts" : value.slice(11, 19),
    condition: (value) => WORDS[value] ?? value,
    width: (value) => (value === null ? 0 : Math.min(value, 1) * 100).toFixed(1),
    peak: (values) => rate(tops(values)),
    spark: (values) => {
      const top = Math.max(tops(values), 1);
      const x = (at) => (118 - (values.length - 1 - at) * 2).toFixed(1);
      const line = values.map((value, at) => `${x(at)},${(33 - 31 * value / top).toFixed(1)}`);
      return line.length ? [`${x(0)},34.0`, ...line, "118.0,34.0"].join(" ") : "";
    },
  };
  const at = (value, path) => path.split(".").reduce((inner, step) => inner?.[step] ?? null, value);
  const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };

  // What is unchanged stays as it is, with whatever is selected in it.
  const changed = (element, items) => {
    const now = JSON.stringify(items);
    return element.shown !== now && Boolean(element.shown = now);
  };

  function items(list, status) {
    const texts = at(status, list.dataset.items);
    if (changed(list, texts)) list.replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  }

  function rows(body, status) {
    const items = at(status, body.dataset.rows);
    if (!changed(body, items)) return;
    const columns = body.dataset.columns.split(" ").map((column) => column.split("|"));
    const cell = (text) => Object.assign(document.createElement("td"), { textContent: text });
    const made = items.map((item) => {
      const row = document.createElement("tr");
      row.append(...columns.map(([path, form]) => cell(String(FORMS[form](at(item, path))))));
      return row;
    });
    if (!made.length) {
      const row = document.createElement("tr");
      row.append(Object.assign(cell("none"), { colSpan: columns.length, className: "none" }));
      made.push(row);
    }
    body.replaceChildren(...made);
  }

  function show(status) {
    document.title = `${status.verdict} · outbox-relay · ${status.slot.name}`;
    for (const element of document.querySelectorAll("[data-key]")) {
      const [path, form] = element.dataset.key.split("|");
      put(element, String(FORMS[form](at(status, path))));
    }
    for (const element of document.querySelectorAll("[data-set]")) {
      const [name, key] = element.dataset.set.split(" ");
      const [path, form] = key.split("|");
      element.setAttribute(name, FORMS[form](at(status, path)));
    }
    document.querySelectorAll("[data-items]").forEach((list) => items(list, status));
    document.querySelectorAll("[data-rows]").forEach((body) => rows(body, status));
  }

  let heard = Date.now();
  const stale = document.getElementById("stale");
  function mark(reason) {
    document.body.toggleAttribute("data-stale", reason !== null);
    stale.hidden = reason === null;
    if (reason !== null) {
      const time = new Date(heard).toISOString().slice(11, 19);
      put(stale, `The relay no longer answers (${reason}). This is how it was at ${time} UTC.`);
    }
  }

  async function refresh() {
    try {
      const answer = await fetch("status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      show(await answer.json());
      heard = Date.now();
      mark(null);
    } catch (error) {
      mark(error.name === "TimeoutError" ? "it takes too long" : error.name === "TypeError" ? "nobody is there" : error.message);
    }
    setTimeout(refresh, EVERY);
  }
  setTimeout(refresh, EVERY);
})();
