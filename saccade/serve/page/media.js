// Images and videos of a conversation: bytes with a name.

const SENT_AS_IS = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]);
const VIDEO_TYPES = { mp4: "mp4", m4v: "mp4", mov: "quicktime", webm: "webm", mkv: "x-matroska", avi: "x-msvideo" };
const MAX_IMAGE_BYTES = 6 * 2 ** 20;
const MAX_SIDE = 2048;

/** An image or a video. Its bytes are in memory, so that it stays as it was attached. */
export class Media {
  #url = null;

  constructor({ id = randomId(), name, blob }) {
    Object.assign(this, { id, name, blob });
  }

  get isVideo() {
    return this.blob.type.startsWith("video/");
  }

  /** An address for elements of this page. */
  get url() {
    this.#url ??= URL.createObjectURL(this.blob);
    return this.#url;
  }

  /** Free the address; a later use makes another. */
  release() {
    if (this.#url) URL.revokeObjectURL(this.#url);
    this.#url = null;
  }

  /** All bytes as a data URL. */
  dataUrl() {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(this.blob);
    });
  }

  /** Bytes that it takes in the body of a request. */
  get sentBytes() {
    return Math.ceil(this.blob.size / 3) * 4;
  }
}

/** A name that no other object has. `crypto.randomUUID` needs TLS. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A file as the server takes it; throws a TypeError if it is neither an image that this browser reads nor a video. */
export async function readMedia(file) {
  const name = file.name || "pasted image";
  const type = videoType(file);
  const content = new Blob([await file.arrayBuffer()], { type: type ?? file.type });
  return new Media({ name, blob: type === null ? await fitting(content) : content });
}

function videoType(file) {
  if (file.type.startsWith("video/")) return file.type.split(";")[0];
  const format = file.type ? undefined : VIDEO_TYPES[file.name.split(".").at(-1).toLowerCase()];
  return format ? `video/${format}` : null;
}

/** The image itself, or a JPEG of at most MAX_SIDE if it is large or in a format servers may not read. */
async function fitting(blob) {
  if (!blob.type.startsWith("image/")) throw new TypeError("not an image");
  const bitmap = await createImageBitmap(blob).catch(() => {
    throw new TypeError("not readable");
  });
  if (SENT_AS_IS.has(blob.type) && blob.size <= MAX_IMAGE_BYTES) return blob;
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = new OffscreenCanvas(Math.round(bitmap.width * scale), Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: 0.92 });
}
