/**
 * @typedef {{ tokens: Token[] }} Cell
 * @typedef {{ type: string, raw: string, text: string, tokens?: Token[], depth: number, href: string,
 *   ordered: boolean, start: number | "", items: Token[], checked: boolean, header: Cell[], rows: Cell[][],
 *   align: (string | null)[] }} Token
 */

/** @type {{ lexer: (text: string) => Token[] }} */
const markdown = /** @type {any} */ (globalThis).marked;

const MAX_MARKDOWN_CHARS = 200_000;
const LINK_PROTOCOLS = ["http:", "https:", "mailto:"];
/** Elements of tokens that only have others in them. @type {Record<string, string>} */
const INLINE_TAGS = { strong: "strong", em: "em", del: "del" };
/** @type {Record<string, string>} */
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** A text that comes bit by bit, shown as Markdown or as it is. Its elements are made one by one, never of HTML. */
class TextView {
  /**
   * @param {HTMLElement} box
   * @param {boolean} isPlain
   */
  constructor(box, isPlain) {
    this.data = "";
    this.isPlain = isPlain;
    this.isDue = false;
    /** @type {{ raw: string, node: Node }[]} */
    this.blocks = [];
    this.box = make("div", "text");
    this.plain = document.createTextNode("");
    box.append(this.box);
    this.redraw();
  }

  /** @param {string} more */
  append(more) {
    this.data += more;
    if (this.isPlain) this.plain.appendData(more);
    else this.drawSoon();
  }

  /** Draw once for all that comes before the next frame. */
  drawSoon() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      follow(() => this.draw());
    });
  }

  /** @param {boolean} isPlain */
  show(isPlain) {
    this.isPlain = isPlain;
    this.redraw();
  }

  /** Draw all anew, because the end of a text may change what its beginning means. */
  redraw() {
    this.blocks = [];
    this.box.replaceChildren();
    this.draw();
  }

  draw() {
    this.box.classList.toggle("markdown", !this.isPlain);
    if (this.isPlain) {
      this.plain.data = this.data;
      this.box.replaceChildren(this.plain);
      return;
    }
    const tokens = readMarkdown(this.data);
    const change = tokens.findIndex((token, index) => token.raw !== this.blocks[index]?.raw);
    const numKept = change < 0 ? tokens.length : change;
    for (const { node } of this.blocks.splice(numKept)) node.parentNode?.removeChild(node);
    for (const token of tokens.slice(numKept)) {
      const node = makeBlock(token);
      this.blocks.push({ raw: token.raw, node });
      this.box.append(node);
    }
  }
}

/** Return the blocks of a text. One that is too long, or nested too deeply to be read, is a single block. */
function readMarkdown(/** @type {string} */ text) {
  const plain = /** @type {Token} */ ({ type: "html", raw: text, text });
  if (text.length > MAX_MARKDOWN_CHARS) return [plain];
  try {
    return markdown.lexer(text);
  } catch (error) {
    if (error instanceof RangeError) return [plain];
    throw error;
  }
}

/**
 * @param {Token} token
 * @returns {Node}
 */
function makeBlock(token) {
  const children = token.tokens ?? [];
  switch (token.type) {
    case "heading":
      return filled(make(`h${Math.min(token.depth + 2, 6)}`), children.map(makeInline));
    case "paragraph":
      return filled(make("p"), children.map(makeInline));
    case "blockquote":
      return filled(make("blockquote"), children.map(makeBlock));
    case "code":
      return scrollable(filled(make("pre"), [make("code", "", token.text)]), "Code");
    case "list":
      return makeList(token);
    case "table":
      return makeTable(token);
    case "hr":
      return make("hr");
    case "html":
      return make("p", "as-is", token.raw);
    case "space":
    case "def":
      return document.createTextNode("");
    default:
      return makeInline(token);
  }
}

/** @param {Token} token */
function makeList(token) {
  const list = make(token.ordered ? "ol" : "ul");
  if (typeof token.start === "number") /** @type {HTMLOListElement} */ (list).start = token.start;
  return filled(
    list,
    token.items.map((item) => filled(make("li"), (item.tokens ?? []).map(makeBlock))),
  );
}

/** @param {Token} token */
function makeTable(token) {
  /**
   * @param {string} tag
   * @param {Cell[]} cells
   */
  const makeRow = (tag, cells) =>
    filled(
      make("tr"),
      cells.map(({ tokens }, column) => {
        const cell = filled(make(tag), tokens.map(makeInline));
        cell.style.textAlign = token.align[column] ?? "";
        return cell;
      }),
    );
  const head = filled(make("thead"), [makeRow("th", token.header)]);
  const body = filled(
    make("tbody"),
    token.rows.map((row) => makeRow("td", row)),
  );
  return scrollable(filled(make("div", "table"), [filled(make("table"), [head, body])]), "Table");
}

/**
 * Let a wide block be scrolled with keys.
 * @template {HTMLElement} T
 * @param {T} box
 * @param {string} name
 */
function scrollable(box, name) {
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", name);
  return box;
}

/**
 * @param {Token} token
 * @returns {Node}
 */
function makeInline(token) {
  const children = () => (token.tokens ?? []).map(makeInline);
  const tag = INLINE_TAGS[token.type];
  if (tag) return filled(make(tag), children());
  switch (token.type) {
    case "codespan":
      return make("code", "", token.text);
    case "br":
      return make("br");
    case "link":
      return makeLink(token, children());
    case "image": // which is not loaded
      return makeLink(token, [`image: ${token.text || token.href}`]);
    case "checkbox":
      return document.createTextNode(token.checked ? "☑ " : "☐ ");
    case "text":
      if (token.tokens) return filled(document.createDocumentFragment(), children());
      return document.createTextNode(decodeEntities(token.text));
    case "escape":
      return document.createTextNode(token.text);
    default:
      return document.createTextNode(token.raw);
  }
}

/**
 * Return a link, or its source if it leads to something else than a page or an address.
 * @param {Token} token
 * @param {(Node | string)[]} children
 */
function makeLink(token, children) {
  if (!LINK_PROTOCOLS.includes(protocolOf(token.href))) return document.createTextNode(token.raw);
  const link = /** @type {HTMLAnchorElement} */ (filled(make("a"), children));
  link.href = token.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  return link;
}

/** @param {string} url */
function protocolOf(url) {
  try {
    return new URL(url).protocol;
  } catch {
    return "";
  }
}

/** @param {string} text */
function decodeEntities(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(\w+));/gi, (all, decimal, hex, name) => {
    if (name) return ENTITIES[name.toLowerCase()] ?? all;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all;
  });
}

/**
 * @template {ParentNode & Node} T
 * @param {T} box
 * @param {(Node | string)[]} children
 */
function filled(box, children) {
  box.append(...children);
  return box;
}
