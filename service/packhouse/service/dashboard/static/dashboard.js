// Keeps each part of the page that names a source of news ([data-live]) as the service draws it. Without this script
// the pages are whole, and as old as the last reload.
"use strict";

const POLL = 2000; // milliseconds between two questions where there is no stream

// Makes `old` what `fresh` is and touches nothing that is alike, so that focus, selection and scrolling stay. Children
// with an id are found again wherever they are now.
function morph(old, fresh) {
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const named = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, at) => {
    const here = old.childNodes[at] ?? null;
    const same = node.id ? named.get(node.id) : here?.id ? null : here;
    if (same?.nodeName !== node.nodeName) return old.insertBefore(node, here);
    if (same !== here) (old.moveBefore ?? old.insertBefore).call(old, same, here); // the former keeps the focus
    if (node.nodeType === Node.ELEMENT_NODE) morph(same, node);
    else if (same.data !== node.data) same.data = node.data;
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function show(part, html) {
  const fresh = part.cloneNode(false);
  fresh.innerHTML = html; // drawn and escaped by the service
  morph(part, fresh);
}

async function poll(part) {
  try {
    const answer = await fetch(`${part.dataset.live}?once=true`);
    if (answer.ok) show(part, await answer.text());
    if (answer.status === 404 || part.querySelector("[data-last]")) return;
  } catch { /* the service is away: ask again */ }
  setTimeout(poll, POLL, part);
}

function follow(part) {
  if (!window.EventSource) return poll(part);
  const stream = new EventSource(part.dataset.live);
  let failures = 0;
  stream.onmessage = (event) => { failures = 0; show(part, event.data); };
  stream.addEventListener("last", () => stream.close());
  stream.onerror = () => {
    if (stream.readyState !== EventSource.CLOSED && ++failures < 3) return; // it asks again by itself
    stream.close();
    poll(part);
  };
  addEventListener("pagehide", () => stream.close(), { once: true });
  addEventListener("pageshow", (event) => { if (event.persisted) follow(part); }, { once: true });
}

document.querySelectorAll("[data-live]").forEach(follow);
document.getElementById("shown")?.focus(); // the answer to a form
