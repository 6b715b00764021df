// Elements without HTML strings: text is always text.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

/** An element with attributes and children. A property that is a function is an event listener; strings become text
 *  nodes. */
export function element(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same in SVG. */
export function drawing(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A quiet button. */
export function button(label, listener, properties = {}) {
  return element("button", { type: "button", class: "quiet", click: listener, ...properties }, label);
}

/** Have screen readers say something once. */
export function announce(text) {
  const node = find("announcer");
  node.textContent = "";
  requestAnimationFrame(() => { node.textContent = text; });
}
