// One image over the whole page: as large as the window, or enlarged and moved around.

import { find } from "./dom.js";

const STEP = 1.5;
const MAX_SCALE = 16;

let scale = 1;
let shown = null;

/** Show an image; closing returns to what had the focus. */
export function openLightbox(media) {
  shown = media;
  const image = find("lightbox-image");
  image.src = media.url;
  image.alt = media.name;
  find("lightbox-title").textContent = media.name;
  find("lightbox-save").href = media.url;
  find("lightbox-save").download = media.name;
  setScale(1);
  find("lightbox").showModal();
}

/** Set the zoom; 1 fits the image into the window. */
function setScale(wanted) {
  const pane = find("lightbox-pane");
  const centre = [
    (pane.scrollLeft + pane.clientWidth / 2) / pane.scrollWidth,
    (pane.scrollTop + pane.clientHeight / 2) / pane.scrollHeight,
  ];
  scale = Math.min(MAX_SCALE, Math.max(1, wanted));
  const image = find("lightbox-image");
  image.style.width = scale === 1 ? "" : `${scale * 100}%`;
  image.style.height = scale === 1 ? "" : `${scale * 100}%`;
  pane.classList.toggle("enlarged", scale > 1);
  find("lightbox-out").disabled = scale === 1;
  find("lightbox-scale").textContent = `${Math.round(scale * 100)} %`;
  pane.scrollLeft = centre[0] * pane.scrollWidth - pane.clientWidth / 2;
  pane.scrollTop = centre[1] * pane.scrollHeight - pane.clientHeight / 2;
}

/** Listen to buttons, keys, the wheel and dragging. */
export function setUpLightbox() {
  const dialog = find("lightbox");
  find("lightbox-in").addEventListener("click", () => setScale(scale * STEP));
  find("lightbox-out").addEventListener("click", () => setScale(scale / STEP));
  find("lightbox-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("keydown", (event) => {
    const wanted = { "+": scale * STEP, "=": scale * STEP, "-": scale / STEP, 0: 1 }[event.key];
    if (wanted !== undefined && !event.ctrlKey && !event.metaKey) setScale(wanted);
  });
  dialog.addEventListener("close", () => {
    find("lightbox-image").removeAttribute("src");
    find("lightbox-save").removeAttribute("href");
    shown = null;
  });
  setUpPane(find("lightbox-pane"));
}

function setUpPane(pane) {
  let grabbed = null;
  let hasMoved = false;
  pane.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      setScale(scale * (event.deltaY < 0 ? STEP ** 0.5 : STEP ** -0.5));
    },
    { passive: false },
  );
  pane.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") return; // touch scrolls without our help
    grabbed = { x: event.clientX + pane.scrollLeft, y: event.clientY + pane.scrollTop };
    hasMoved = false;
    pane.setPointerCapture(event.pointerId);
  });
  pane.addEventListener("pointermove", (event) => {
    if (!grabbed) return;
    hasMoved ||= Math.abs(event.movementX) + Math.abs(event.movementY) > 1;
    pane.scrollTo(grabbed.x - event.clientX, grabbed.y - event.clientY);
  });
  pane.addEventListener("pointerup", () => {
    grabbed = null;
  });
  pane.addEventListener("dblclick", () => setScale(scale === 1 ? STEP ** 2 : 1));
  pane.addEventListener("click", (event) => {
    if (shown && event.target === pane && !hasMoved && scale === 1) find("lightbox").close();
  });
}
