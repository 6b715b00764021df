// Images of the next question: chosen, dropped or pasted, shown as thumbnails.

import { announce, drawing, element, find } from "./dom.js";

const SENT_AS_IS = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]);
const MAX_BYTES = 6 * 2 ** 20;
const MAX_SIDE = 2048;

let attached = [];

/** Listen to the file button, to dropping and to pasting; `onProblem` gets a sentence. */
export function setUpImages(onProblem) {
  const add = (files) => addFiles(files, onProblem);
  find("files").addEventListener("change", (event) => {
    add(event.target.files);
    event.target.value = "";
  });
  document.addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) {
      event.preventDefault();
      add(event.clipboardData.files);
    }
  });
  setUpDropping(add);
}

function setUpDropping(add) {
  let depth = 0;
  const show = (change) => {
    depth = Math.max(0, depth + change);
    find("drop").hidden = depth === 0;
  };
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragenter", (event) => hasFiles(event) && show(1));
  document.addEventListener("dragleave", (event) => hasFiles(event) && show(-1));
  document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    show(-depth);
    add(event.dataTransfer.files);
  });
}

async function addFiles(files, onProblem) {
  for (const file of files) {
    try {
      attached.push({ name: file.name || "pasted image", url: await dataUrl(await fitting(file)) });
    } catch {
      onProblem(`${file.name || "The file"} is not an image this browser can read. Use PNG, JPEG, WebP or GIF.`);
    }
  }
  render();
  if (attached.length) announce(`${attached.length} images attached`);
}

/** The file itself, or a JPEG of at most MAX_SIDE if it is large or in a format servers may not read. */
async function fitting(file) {
  if (!file.type.startsWith("image/")) throw new TypeError("not an image");
  const bitmap = await createImageBitmap(file);
  if (SENT_AS_IS.has(file.type) && file.size <= MAX_BYTES) return file;
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = new OffscreenCanvas(Math.round(bitmap.width * scale), Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

function render() {
  find("thumbs").hidden = attached.length === 0;
  find("thumbs").replaceChildren(...attached.map(thumbnail));
}

function thumbnail(image) {
  const remove = () => {
    attached = attached.filter((other) => other !== image);
    render();
    find("prompt").focus();
  };
  const cross = drawing("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, drawing("path", { d: "M5 5l14 14M19 5 5 19" }));
  return element(
    "li",
    {},
    element("img", { src: image.url, alt: image.name }),
    element("button", { type: "button", "aria-label": `Remove ${image.name}`, click: remove }, cross),
  );
}

/** Take the attached images; none are attached afterwards. */
export function takeImages() {
  const taken = attached;
  attached = [];
  render();
  return taken;
}
