// Bodies of requests: what has been said, in OpenAI's form.

/** A message with its images and videos before its text. `urlOf(media)` returns the URL that replaces the bytes. */
export function turn({ role, text, media }, urlOf, fps = null) {
  if (!media?.length) return { role, content: text };
  const parts = media.map((one) => {
    const url = urlOf(one);
    if (!one.isVideo) return { type: "image_url", image_url: { url } };
    return { type: "video_url", video_url: { url }, ...(fps === null ? {} : { fps }) };
  });
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

/** The body that asks for an answer to `messages`. `settings` has the model, the system message, the frame rate and
 *  the sampling fields. */
export function requestBody(messages, { model, system, fps, sampling }, urlOf) {
  const turns = messages.filter(({ text, media }) => text || media?.length).map((message) => turn(message, urlOf, fps));
  return { model, messages: system ? [{ role: "system", content: system }, ...turns] : turns, ...sampling };
}

/** Data URLs of all images and videos, as a function. */
export async function dataUrls(messages) {
  const all = messages.flatMap(({ media }) => media ?? []);
  const urls = new Map(await Promise.all(all.map(async (media) => [media, await media.dataUrl()])));
  return (media) => urls.get(media);
}
