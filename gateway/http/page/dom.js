// Makes elements. Data from the cluster or a model becomes text or an attribute's value, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  setAttributes(element, attributes);
  return element;
}

export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

// Does nothing if the text is unchanged, so that an idle page costs no layout.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
