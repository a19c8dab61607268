//! Questions of one process to the one that owns a session, over the store's channels: a device came here, and the
//! owner may still serve it.
//!
//! ```text
//!  node b: a SYN, looked up, owned by a ── ask ─▶ nobody listens: a is gone, b goes on at once
//!                                            └──▶ a writes what it has of the session ── say ─▶ b looks it up again
//! ```
//!
//! The store counts who listens, and the kernel closes the connections of a process that was killed: its sessions are
//! taken over without waiting. A machine that lost its power still counts for a while, so answers have a time limit.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use d2tp_driver::{JournalError, JournalSessionKey, OwnerAnswer, OwnerQuestion};
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::StoreInner;

/// How long an owner may take to answer: it writes the session first.
const ANSWER_WITHIN: Duration = Duration::from_secs(1); // a guess: a busy machine
/// How long an owner that did not answer is not asked again.
const SILENT_FOR: Duration = Duration::from_secs(10); // a guess
/// How soon a process listens again whose connection was lost.
const LISTEN_AGAIN: Duration = Duration::from_millis(500); // a guess
/// How long nothing may be heard until this process listens on a new connection: the old one may have died without a sign.
const LISTEN_ANEW: Duration = Duration::from_secs(30); // a guess
/// The most questions that wait for an answer of this process. Others are not answered.
const QUESTIONS_MAX: usize = 1_024; // a guess: more than all nodes look up at once

/// Questions that this process asked, and those that it was asked.
#[derive(Debug, Default)]
pub(crate) struct OwnerQuestions {
    numbers: AtomicU64,
    waiting: Mutex<HashMap<u64, oneshot::Sender<OwnerAnswer>>>,
    /// Owners that did not answer, and when.
    silent: Mutex<HashMap<String, Instant>>,
    asked: Mutex<VecDeque<OwnerQuestion>>,
    has_asked: Notify,
}

impl OwnerQuestions {
    fn is_silent(&self, owner: &str) -> bool {
        let mut silent = self.silent.lock();
        silent.retain(|_, at| at.elapsed() < SILENT_FOR);
        silent.contains_key(owner)
    }

    /// Handles a message on this process's channel.
    fn on_message(&self, text: &str) {
        let mut words = text.splitn(4, ' ');
        let (what, number) = (words.next(), words.next().and_then(|n| n.parse().ok()));
        let (Some(what), Some(number), Some(third)) = (what, number, words.next()) else {
            return;
        };
        match (what, words.next()) {
            ("say", _) => {
                let answer = match third {
                    "written" => OwnerAnswer::Written,
                    "busy" => OwnerAnswer::Busy,
                    _ => OwnerAnswer::Nothing,
                };
                if let Some(waiting) = self.waiting.lock().remove(&number) {
                    let _ = waiting.send(answer);
                }
            }
            ("ask", Some(asker)) => {
                let key = hex::decode(third).ok();
                let Some(session) = key.and_then(|key| JournalSessionKey::from_bytes(&key)) else {
                    return;
                };
                let mut asked = self.asked.lock();
                if asked.len() < QUESTIONS_MAX {
                    asked.push_back(OwnerQuestion {
                        session,
                        number,
                        asker: asker.to_owned(),
                    });
                    self.has_asked.notify_one();
                }
            }
            _ => {}
        }
    }

    /// The next question to this process.
    pub(crate) async fn next(&self) -> OwnerQuestion {
        loop {
            let news = self.has_asked.notified();
            if let Some(question) = self.asked.lock().pop_front() {
                return question;
            }
            news.await;
        }
    }
}

impl StoreInner {
    fn channel(&self, process: &str) -> Vec<u8> {
        self.key(b"q", process.as_bytes())
    }

    /// Asks the process that owns a session for what it has of it.
    pub(crate) async fn ask_owner(
        &self,
        session: JournalSessionKey,
        owner: &str,
    ) -> Result<OwnerAnswer, JournalError> {
        if self.questions.is_silent(owner) {
            return Ok(OwnerAnswer::Gone);
        }
        let number = self.questions.numbers.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        self.questions.waiting.lock().insert(number, answer);
        let (asker, member) = (&self.connection.process, hex::encode(session.bytes()));
        let text = format!("ask {number} {member} {asker}");
        let published = self.connection.publish(&self.channel(owner), &text).await;
        let told = match published {
            Ok(0) => Ok(OwnerAnswer::Gone),
            Ok(_) => match tokio::time::timeout(ANSWER_WITHIN, answered).await {
                Ok(answer) => Ok(answer.unwrap_or(OwnerAnswer::Gone)),
                Err(_) => {
                    let mut silent = self.questions.silent.lock();
                    silent.insert(owner.to_owned(), Instant::now());
                    Ok(OwnerAnswer::Gone)
                }
            },
            Err(error) => Err(error),
        };
        self.questions.waiting.lock().remove(&number);
        told
    }

    /// Answers a question.
    pub(crate) async fn answer_question(
        &self,
        question: &OwnerQuestion,
        answer: OwnerAnswer,
    ) -> Result<(), JournalError> {
        let word = match answer {
            OwnerAnswer::Written => "written",
            OwnerAnswer::Busy => "busy",
            OwnerAnswer::Nothing | OwnerAnswer::Gone => "nothing",
        };
        let text = format!("say {} {word}", question.number);
        let channel = self.channel(&question.asker);
        self.connection.publish(&channel, &text).await.map(drop)
    }
}

/// Listens to questions and answers while the store is open.
pub(crate) async fn listen(store: Weak<StoreInner>) {
    loop {
        let messages = {
            let Some(store) = store.upgrade() else {
                return;
            };
            let channel = store.channel(&store.connection.process);
            store.connection.listen(&channel).await
        };
        // The store's state is in the log already.
        if let Ok(mut messages) = messages {
            loop {
                let message = tokio::time::timeout(LISTEN_ANEW, messages.next()).await;
                let Some(store): Option<Arc<StoreInner>> = store.upgrade() else {
                    return;
                };
                let message = match message {
                    Ok(Some(message)) => message,
                    Ok(None) => break,
                    Err(_) => {
                        // It may have died without a sign. The old one listens until the new one does.
                        let channel = store.channel(&store.connection.process);
                        match store.connection.listen(&channel).await {
                            Ok(new) => messages = new,
                            Err(_) => break,
                        }
                        continue;
                    }
                };
                if let Ok(text) = std::str::from_utf8(message.get_payload_bytes()) {
                    store.questions.on_message(text);
                }
            }
        }
        tokio::time::sleep(LISTEN_AGAIN).await;
    }
}
