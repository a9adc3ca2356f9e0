const LEAST_OF_SHADES = [0, 0.1, 0.3, 0.6, 0.9];

/** Token whose alternatives are shown. @type {HTMLElement | null} */
let describedToken = null;

/** Tokens of an answer, shaded by probability. Tab reaches one of them, arrow keys the others. */
class TokenStrip {
  /** @param {HTMLElement} box */
  constructor(box) {
    /** @type {Map<EventTarget, TokenLogprob>} */
    this.details = new Map();
    this.box = make("div", "tokens");
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Tokens; arrow keys move between them");
    box.append(this.box, makeLegend());
    for (const type of ["pointerover", "focusin"]) {
      this.box.addEventListener(type, (event) => this.show(event));
    }
    for (const type of ["pointerout", "focusout"]) this.box.addEventListener(type, hideAlternatives);
    this.box.addEventListener("keydown", (event) => this.move(event));
  }

  /** @param {TokenLogprob} detail */
  add(detail) {
    const text = spell(detail);
    const button = /** @type {HTMLButtonElement} */ (make("button", "token", showSpaces(text, " ")));
    button.type = "button";
    button.tabIndex = this.details.size ? -1 : 0;
    button.dataset.likely = String(shadeOf(detail));
    button.setAttribute("aria-label", `${showSpaces(text, "␣")}, ${percent(detail.logprob)}`);
    button.setAttribute("aria-describedby", "alternatives");
    this.details.set(button, detail);
    this.box.append(button, "\n".repeat(text.split("\n").length - 1));
  }

  /** @param {Event} event */
  show(event) {
    const detail = event.target && this.details.get(event.target);
    if (detail) showAlternatives(/** @type {HTMLElement} */ (event.target), detail);
  }

  /** @param {KeyboardEvent} event */
  move(event) {
    const buttons = /** @type {HTMLButtonElement[]} */ ([...this.details.keys()]);
    const from = buttons.indexOf(/** @type {HTMLButtonElement} */ (event.target));
    const last = buttons.length - 1;
    /** @type {Record<string, number>} */
    const places = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last };
    const to = places[event.key];
    if (to === undefined || from < 0) return;
    event.preventDefault();
    buttons[from].tabIndex = -1;
    const next = buttons[Math.min(Math.max(to, 0), last)];
    next.tabIndex = 0;
    next.focus();
  }
}

function makeLegend() {
  const legend = make("p", "hint legend", "Probability from ");
  LEAST_OF_SHADES.forEach((least, shade) => {
    const sample = make("span", "token", `${least * 100} %`);
    sample.dataset.likely = String(shade);
    legend.append(sample, " ");
  });
  return legend;
}

/** @param {Candidate} candidate */
function shadeOf(candidate) {
  const probability = Math.exp(candidate.logprob);
  return LEAST_OF_SHADES.filter((least) => probability >= least).length - 1;
}

/**
 * Return the text of a token; that of a special token, or of a part of a character, is its name.
 * @param {Candidate} candidate
 */
function spell(candidate) {
  if (!candidate.bytes) return candidate.token;
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(candidate.bytes));
  } catch {
    return candidate.token;
  }
}

/**
 * @param {string} text
 * @param {string} space
 */
function showSpaces(text, space) {
  return text.replaceAll(" ", space).replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}

/** @param {number} logprob */
function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(2)} %`;
}

/**
 * @param {HTMLElement} token
 * @param {TokenLogprob} detail
 */
function showAlternatives(token, detail) {
  const table = make("table");
  table.append(make("caption", "", detail.top_logprobs.length ? "Likeliest tokens" : "Token"));
  const isInTop = detail.top_logprobs.some((candidate) => candidate.token === detail.token);
  for (const candidate of detail.top_logprobs) {
    table.append(makeRow(candidate, candidate.token === detail.token));
  }
  if (!isInTop) table.append(makeRow(detail, true));
  const box = byId("alternatives");
  box.replaceChildren(table);
  box.hidden = false;
  describedToken = token;
  placeAlternatives();
}

/**
 * @param {Candidate} candidate
 * @param {boolean} isChosen
 */
function makeRow(candidate, isChosen) {
  const row = make("tr", isChosen ? "chosen" : "");
  const name = make("th", "", showSpaces(spell(candidate), "␣"));
  name.setAttribute("scope", "row");
  row.append(name, make("td", "", percent(candidate.logprob)), make("td", "", isChosen ? "chosen" : ""));
  return row;
}

/** Put the alternatives beside their token, which scrolls. */
function placeAlternatives() {
  if (!describedToken) return;
  const box = byId("alternatives");
  const place = describedToken.getBoundingClientRect();
  const size = box.getBoundingClientRect();
  const left = Math.min(place.left, window.innerWidth - size.width - 8);
  const isRoomBelow = place.bottom + size.height + 8 < window.innerHeight;
  box.style.left = `${Math.max(left, 8)}px`;
  box.style.top = `${isRoomBelow ? place.bottom + 6 : Math.max(place.top - size.height - 6, 0)}px`;
}

function hideAlternatives() {
  describedToken = null;
  byId("alternatives").hidden = true;
}
