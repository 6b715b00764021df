// Text to the clipboard, and files to the reader's disk.

import { announce, button, element } from "./dom.js";

/** Copy a text; returns whether the browser did. Pages without TLS have no clipboard API: there a selection is
 *  copied. */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // the reader has denied it: try the selection
    }
  }
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  const focused = document.activeElement;
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

/** A button that copies what `text()` returns and says so. */
export function copyButton(label, text, properties = {}) {
  const node = button(
    label,
    async () => {
      const isCopied = await copyText(await text());
      node.textContent = isCopied ? "Copied" : "Not copied";
      announce(node.textContent);
      setTimeout(() => {
        node.textContent = label;
      }, 1500);
    },
    properties,
  );
  return node;
}

/** Have the browser save a file. */
export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
