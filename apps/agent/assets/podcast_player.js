// The player of an episode. Without this script the browser's own controls play the episode, but its position is not
// stored.
"use strict";

const STORE_EVERY_MS = 10_000;
const BACK_S = 15;
const FORWARD_S = 30;

const player = document.getElementById("player");

function startPlayer() {
  const audio = document.getElementById("audio");
  const speed = document.getElementById("speed");
  const sleep = document.getElementById("sleep");
  const state = document.getElementById("player-state");
  const live = document.getElementById("live");
  let storedAt = 0;
  let storedMs = Number(player.dataset.position);
  let sleepTimer = 0;
  // Where to go on when the file is loaded, in seconds.
  let resumeAt = storedMs / 1000;
  // Until the position is restored, the beginning is nobody's choice.
  let isRestored = false;
  // What is to be played once there is something to play.
  let isAwaited = false;
  let hasFailed = false;
  // The tag of the bytes that are played.
  let edition = presentEdition();
  let isUseless = false;

  function show(text) {
    if (state.textContent !== text) {
      state.textContent = text;
    }
  }

  // How much of the episode the agent can give: "nothing", "beginning" or "whole".
  function playable() {
    return document.getElementById("state")?.dataset.playable ?? "whole";
  }

  // The tag of the bytes that the agent can give.
  function presentEdition() {
    return document.getElementById("state")?.dataset.edition ?? "";
  }

  function store() {
    if (!isRestored || !Number.isFinite(audio.duration)) {
      return;
    }
    const positionMs = Math.round(audio.currentTime * 1000);
    if (positionMs === storedMs) {
      return;
    }
    storedMs = positionMs;
    storedAt = Date.now();
    const fields = { position_ms: positionMs, duration_ms: Math.round(audio.duration * 1000) };
    // It arrives even if this page is closed meanwhile.
    fetch(player.dataset.store, { method: "POST", body: new URLSearchParams(fields), keepalive: true })
      .then((answer) => {
        if (!answer.ok) {
          show("The position is not stored: this link may have been replaced.");
        }
      })
      .catch(() => show("The position is not stored: the agent does not answer."));
  }

  function seek(to) {
    audio.currentTime = Math.max(0, Math.min(to, audio.duration || to));
  }

  function play() {
    // A browser that lets nobody but its user begin shows its own button.
    audio.play().catch(() => {});
  }

  function restore() {
    if (isRestored) {
      return;
    }
    if (resumeAt > 0 && resumeAt < audio.duration) {
      audio.currentTime = resumeAt;
    }
    isRestored = true;
  }

  function load() {
    hasFailed = false;
    isRestored = false;
    edition = presentEdition();
    // So the agent never gives a part of other bytes.
    audio.src = edition === "" ? player.dataset.audio : `${player.dataset.audio}?edition=${edition}`;
    audio.playbackRate = Number(speed.value);
  }

  // Which chapter is being played, for eyes and screen readers.
  function markChapter() {
    const chapters = [...live.querySelectorAll("[data-start]")];
    const present = chapters.findLast((chapter) => Number(chapter.dataset.start) <= audio.currentTime);
    for (const chapter of chapters) {
      if (chapter === present && isRestored) {
        chapter.setAttribute("aria-current", "true");
      } else {
        chapter.removeAttribute("aria-current");
      }
    }
  }

  // What of the episode is here has changed, or may have.
  function look() {
    const part = playable();
    player.hidden = part === "nothing";
    if (part === "nothing") {
      return;
    }
    if (!audio.hasAttribute("src") || (hasFailed && !isUseless)) {
      load();
    } else if (edition !== presentEdition()) {
      // The download began anew: what was loaded is of a file that is no more.
      resumeAt = isRestored ? audio.currentTime : resumeAt;
      isAwaited ||= !audio.paused;
      load();
    }
    markChapter();
    if (isAwaited) {
      isAwaited = false;
      play();
    }
  }

  const skips = {
    seekbackward: (details) => seek(audio.currentTime - (details?.seekOffset ?? BACK_S)),
    seekforward: (details) => seek(audio.currentTime + (details?.seekOffset ?? FORWARD_S)),
  };

  if (audio.readyState >= HTMLMediaElement.HAVE_METADATA) {
    restore();
  }
  audio.addEventListener("loadedmetadata", restore);
  audio.addEventListener("timeupdate", () => {
    markChapter();
    if (!audio.paused && Date.now() - storedAt >= STORE_EVERY_MS) {
      store();
    }
  });
  for (const event of ["pause", "ended", "seeked"]) {
    audio.addEventListener(event, store);
  }
  audio.addEventListener("waiting", () => {
    if (playable() === "beginning") {
      show("Waiting for more of the episode.");
    }
  });
  for (const event of ["playing", "canplay"]) {
    audio.addEventListener(event, () => show(""));
  }
  audio.addEventListener("error", () => {
    if (isRestored) {
      resumeAt = audio.currentTime;
    }
    isAwaited ||= !audio.paused;
    hasFailed = true;
    isUseless = playable() === "whole";
    show(
      isUseless
        ? "This browser cannot play the file, or the file was removed. Reload the page to see."
        : "The download does not go on, so there is no more to play. Playing goes on when it does.",
    );
  });
  window.addEventListener("pagehide", store);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      store();
    }
  });

  document.getElementById("back").addEventListener("click", () => skips.seekbackward());
  document.getElementById("forward").addEventListener("click", () => skips.seekforward());
  speed.addEventListener("change", () => {
    audio.playbackRate = Number(speed.value);
  });
  sleep.addEventListener("change", () => {
    clearTimeout(sleepTimer);
    const minutes = Number(sleep.value);
    if (minutes > 0) {
      sleepTimer = setTimeout(() => {
        audio.pause();
        sleep.value = "0";
      }, minutes * 60_000);
    }
  });
  live.addEventListener("click", (event) => {
    const chapter = event.target.closest("[data-start]");
    if (chapter) {
      seek(Number(chapter.dataset.start));
      play();
    }
  });
  live.addEventListener("submit", (event) => {
    const action = event.submitter?.value;
    if (action === "play" || action === "not-wanted") {
      isAwaited = action === "play";
    }
  });
  live.addEventListener("update", look);
  document.getElementById("controls").hidden = false;

  if ("mediaSession" in navigator) {
    navigator.mediaSession.metadata = new MediaMetadata({ title: player.dataset.title, artist: player.dataset.channel });
    const handlers = {
      play: () => audio.play(),
      pause: () => audio.pause(),
      seekto: (details) => seek(details.seekTime),
      ...skips,
    };
    for (const [action, handler] of Object.entries(handlers)) {
      try {
        navigator.mediaSession.setActionHandler(action, handler);
      } catch {
        // This browser has no such key.
      }
    }
  }
}

if (player) {
  startPlayer();
}
