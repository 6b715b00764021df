// Images and videos of the next question: chosen, dropped or pasted, shown as thumbnails.

import { announce, drawing, element, find } from "./dom.js";
import { openLightbox } from "./lightbox.js";
import { readMedia } from "./media.js";

let attached = [];
let reading = Promise.resolve();
let round = 0;

/** Listen to the file button, to dropping and to pasting; `onProblem` gets a sentence. */
export function setUpAttachments(onProblem) {
  const add = (files) => addFiles([...files], onProblem);
  find("files").addEventListener("change", (event) => {
    add(event.target.files);
    event.target.value = ""; // this empties the list of files as well, which was copied
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

/** Read files one after another, after those that were added before. Files that are cleared meanwhile are not attached. */
function addFiles(files, onProblem) {
  const added = round;
  reading = reading.then(async () => {
    for (const file of files) {
      try {
        const media = await readMedia(file);
        if (added !== round) return;
        attached.push(media);
        render();
      } catch (error) {
        if (!(error instanceof TypeError) && error.name !== "NotReadableError") throw error;
        onProblem(
          `${file.name || "The file"} is neither an image that this browser can read (PNG, JPEG, WebP, GIF) nor a video (MP4, MOV, WebM, MKV, AVI).`,
        );
      }
    }
    if (attached.length) announce(`${attached.length} ${attached.length === 1 ? "file" : "files"} attached`);
  });
}

function render() {
  find("thumbs").hidden = attached.length === 0;
  find("thumbs").replaceChildren(...attached.map(thumbnail));
}

function thumbnail(media) {
  const remove = () => {
    attached = attached.filter((other) => other !== media);
    media.release();
    render();
    find("prompt").focus();
  };
  const cross = drawing(
    "svg",
    { viewBox: "0 0 24 24", "aria-hidden": "true" },
    drawing("path", { d: "M5 5l14 14M19 5 5 19" }),
  );
  return element(
    "li",
    {},
    preview(media),
    element("button", { type: "button", class: "remove", "aria-label": `Remove ${media.name}`, click: remove }, cross),
  );
}

/** An image that opens large, or a video. */
export function preview(media) {
  if (media.isVideo)
    return element("video", {
      src: media.url,
      controls: true,
      muted: true,
      playsinline: true,
      preload: "metadata",
      title: media.name,
      "aria-label": `Video ${media.name}`,
    });
  const image = element("img", { src: media.url, alt: media.name });
  return element(
    "button",
    { type: "button", class: "zoom", "aria-label": `Enlarge ${media.name}`, click: () => openLightbox(media) },
    image,
  );
}

/** The attached files once all that were added have been read. */
export async function attachments() {
  await reading;
  return attached;
}

/** Take the attached files; none are attached afterwards. */
export function takeAttachments() {
  const taken = attached;
  attached = [];
  render();
  return taken;
}

/** Remove the attached files, also those that are still being read. */
export function clearAttachments() {
  round += 1;
  for (const media of takeAttachments()) media.release();
}
