//! The connection to the store, renewed when it fails, and what is known of the store's health.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use d2tp_driver::JournalError;
use parking_lot::Mutex;
use redis::aio::{MultiplexedConnection, PubSubStream};
use redis::{AsyncConnectionConfig, Client, ErrorKind, RedisError, cmd};

use crate::scripts::{SCRIPTS, ScriptEffect, StoreScript};

/// How long the store may take for an answer. A store that takes longer counts as away.
const ANSWER_WITHIN: Duration = Duration::from_secs(2); // a guess
/// How long a connection may take to be made.
const CONNECT_WITHIN: Duration = Duration::from_secs(2); // a guess
/// How long after a failed connection no other is tried.
const CONNECT_PAUSE: Duration = Duration::from_millis(200); // a guess
/// How long the store remembers the number of a process's newest connection.
const FENCE_FOR: Duration = Duration::from_secs(30 * 24 * 3600);

/// Whether a store answers and takes records, as of the last request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreHealth {
    /// The store answered last, and takes records.
    Ready,
    /// The store cannot be reached, or does not answer.
    Away,
    /// The store is full, and takes nothing.
    Full,
    /// The store can be read only.
    ReadOnly,
    /// The store answers with another error.
    Faulty,
}

impl StoreHealth {
    /// The name of the state, for `cedos prox status`.
    pub fn as_str(self) -> &'static str {
        match self {
            StoreHealth::Ready => "ready",
            StoreHealth::Away => "away",
            StoreHealth::Full => "full",
            StoreHealth::ReadOnly => "read-only",
            StoreHealth::Faulty => "faulty",
        }
    }

    fn of(error: &RedisError) -> StoreHealth {
        match error.code() {
            Some("OOM") => StoreHealth::Full,
            Some("READONLY") => StoreHealth::ReadOnly,
            Some("LOADING" | "MASTERDOWN" | "BUSY") => StoreHealth::Away,
            Some("NOSCRIPT") => StoreHealth::Ready,
            Some(_) => StoreHealth::Faulty,
            None => StoreHealth::Away,
        }
    }
}

/// What the answer to a script means.
pub(crate) type ScriptAnswer = Vec<Vec<u8>>;

/// A connection with the number by which the store knows it.
#[derive(Clone)]
struct NumberedConnection {
    number: u64,
    io: MultiplexedConnection,
}

/// The connection of a process to its store.
pub(crate) struct StoreConnection {
    client: Client,
    place: String,
    /// The process, by a name that no other has.
    pub(crate) process: String,
    fence_key: Vec<u8>,
    processes_key: Vec<u8>,
    open: tokio::sync::Mutex<(Option<NumberedConnection>, Option<std::time::Instant>)>,
    numbers: AtomicU64,
    health: Mutex<StoreHealth>,
}

/// The keys and arguments of a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScriptCall {
    pub(crate) keys: Vec<Vec<u8>>,
    /// Without the number of the connection, which comes first.
    pub(crate) arguments: Vec<Vec<u8>>,
}

impl StoreConnection {
    pub(crate) fn new(
        client: Client,
        place: String,
        process: String,
        fence_key: Vec<u8>,
        processes_key: Vec<u8>,
    ) -> StoreConnection {
        StoreConnection {
            client,
            place,
            process,
            fence_key,
            processes_key,
            open: tokio::sync::Mutex::default(),
            numbers: AtomicU64::new(0),
            health: Mutex::new(StoreHealth::Ready),
        }
    }

    pub(crate) fn place(&self) -> &str {
        &self.place
    }

    pub(crate) fn health(&self) -> StoreHealth {
        *self.health.lock()
    }

    /// The error of an operation, for people.
    pub(crate) fn error(&self, cause: impl Into<String>) -> JournalError {
        JournalError::Store {
            place: self.place.clone(),
            cause: cause.into(),
        }
    }

    /// Notes what an answer says of the store, and says it in the log when it has changed.
    fn note_health(&self, now: StoreHealth, cause: &str) {
        let was = std::mem::replace(&mut *self.health.lock(), now);
        if was == now {
            return;
        }
        let store = self.place.as_str();
        match now {
            StoreHealth::Ready => tracing::info!(store, "the store is back"),
            _ => tracing::warn!(
                store,
                state = now.as_str(),
                cause,
                "the store does not take records; what runs goes on, and devices that sleep wait"
            ),
        }
    }

    /// Notes that the store answered. What a full store or a replica answers, too, shows nothing about that.
    fn note_answer(&self, effect: ScriptEffect) {
        let is_shown = match self.health() {
            StoreHealth::Full => effect == ScriptEffect::Writes,
            StoreHealth::ReadOnly => effect != ScriptEffect::Reads,
            StoreHealth::Ready | StoreHealth::Away | StoreHealth::Faulty => true,
        };
        if is_shown {
            self.note_health(StoreHealth::Ready, "");
        }
    }

    fn in_words(&self, error: &RedisError) -> JournalError {
        let health = StoreHealth::of(error);
        self.note_health(health, &error.to_string());
        self.error(match health {
            StoreHealth::Full => "is full; give it more memory (maxmemory)".to_owned(),
            StoreHealth::ReadOnly => {
                "can only be read; name the one that replicas copy from".to_owned()
            }
            StoreHealth::Away | StoreHealth::Ready => {
                format!("does not answer ({error}); see whether it runs")
            }
            StoreHealth::Faulty => format!("refuses a command: {error}"),
        })
    }

    async fn connection(&self) -> Result<NumberedConnection, JournalError> {
        let mut open = self.open.lock().await;
        let (held, failed) = &mut *open;
        if let Some(held) = held {
            return Ok(held.clone());
        }
        if failed.is_some_and(|at| at.elapsed() < CONNECT_PAUSE) {
            return Err(self.error("does not answer; see whether it runs"));
        }
        match self.connect().await {
            Ok(new) => {
                *failed = None;
                Ok(held.insert(new).clone())
            }
            Err(error) => {
                *failed = Some(std::time::Instant::now());
                Err(self.in_words(&error))
            }
        }
    }

    async fn connect(&self) -> Result<NumberedConnection, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_WITHIN))
            .set_response_timeout(Some(ANSWER_WITHIN));
        let mut io = self
            .client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        for script in SCRIPTS.all() {
            let load = cmd("SCRIPT").arg("LOAD").arg(&script.text).to_owned();
            let _: String = load.query_async(&mut io).await?;
        }
        // From here on the store takes nothing that was sent on an earlier connection.
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let connected = cmd("EVALSHA")
            .arg(&SCRIPTS.connect.digest)
            .arg(2)
            .arg(&self.fence_key)
            .arg(&self.processes_key)
            .arg(number)
            .arg(&self.process)
            .arg(FENCE_FOR.as_millis() as u64)
            .to_owned();
        let _: ScriptAnswer = connected.query_async(&mut io).await?;
        Ok(NumberedConnection { number, io })
    }

    /// Closes a connection, so that the next call makes another.
    async fn drop_connection(&self, number: u64) {
        let mut open = self.open.lock().await;
        if open.0.as_ref().is_some_and(|held| held.number == number) {
            open.0 = None;
        }
    }

    /// Calls a script.
    pub(crate) async fn call(
        &self,
        script: &StoreScript,
        call: &ScriptCall,
    ) -> Result<ScriptAnswer, JournalError> {
        let mut last = None;
        // The second try is for a store that was restarted, and knows neither script nor connection.
        for _ in 0..2 {
            let mut connection = self.connection().await?;
            let mut command = cmd("EVALSHA");
            command.arg(&script.digest).arg(call.keys.len());
            for key in &call.keys {
                command.arg(key);
            }
            command.arg(connection.number);
            for argument in &call.arguments {
                command.arg(argument);
            }
            let answer: Result<ScriptAnswer, RedisError> =
                command.query_async(&mut connection.io).await;
            match answer {
                Ok(answer) if answer.first().is_some_and(|word| word == b"stale") => {
                    self.drop_connection(connection.number).await;
                    let store = self.place.as_str();
                    tracing::warn!(
                        store,
                        "the store does not know this process any more: it was emptied, or another process of this \
                         node's name was started"
                    );
                    last = Some(self.error("was emptied, or another process has this one's name"));
                }
                Ok(answer) => {
                    self.note_answer(script.effect);
                    return Ok(answer);
                }
                Err(error) => {
                    let is_refusal = matches!(
                        StoreHealth::of(&error),
                        StoreHealth::Full | StoreHealth::Faulty
                    );
                    if !is_refusal {
                        self.drop_connection(connection.number).await;
                    }
                    let is_script_gone = error.code() == Some("NOSCRIPT");
                    let error = self.in_words(&error);
                    if !is_script_gone {
                        return Err(error);
                    }
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or_else(|| self.error("does not answer")))
    }

    /// A part of what the store says of itself (`INFO`).
    pub(crate) async fn info(&self, section: &str) -> Result<String, JournalError> {
        let mut connection = self.connection().await?;
        let asked = cmd("INFO").arg(section).to_owned();
        let told: Result<String, RedisError> = asked.query_async(&mut connection.io).await;
        told.map_err(|error| self.in_words(&error))
    }

    /// The members of a set.
    pub(crate) async fn members(&self, key: &[u8]) -> Result<ScriptAnswer, JournalError> {
        let mut connection = self.connection().await?;
        let asked = cmd("SMEMBERS").arg(key).to_owned();
        let told = asked.query_async(&mut connection.io).await;
        told.map_err(|error: RedisError| self.in_words(&error))
    }

    /// The value of a key.
    pub(crate) async fn value(&self, key: &[u8]) -> Result<Option<Vec<u8>>, JournalError> {
        let mut connection = self.connection().await?;
        let number = connection.number;
        let asked = cmd("GET").arg(key).to_owned();
        let told = asked.query_async(&mut connection.io).await;
        match told {
            Ok(value) => Ok(value),
            Err(error) => {
                self.drop_connection(number).await;
                Err(self.in_words(&error))
            }
        }
    }

    /// Sends a message to who listens to a channel. Returns how many do.
    pub(crate) async fn publish(&self, channel: &[u8], text: &str) -> Result<u64, JournalError> {
        let mut connection = self.connection().await?;
        let number = connection.number;
        let message = cmd("PUBLISH").arg(channel).arg(text).to_owned();
        let heard: Result<u64, RedisError> = message.query_async(&mut connection.io).await;
        match heard {
            Ok(heard) => Ok(heard),
            Err(error) if error.code() == Some("NOPERM") => {
                // Sessions are taken over all the same, without what their owner has not written.
                static IS_SAID: std::sync::Once = std::sync::Once::new();
                IS_SAID.call_once(|| {
                    let store = self.place.as_str();
                    tracing::warn!(
                        store,
                        "the store's user may not send messages; give it the channels of its prefix (ACL SETUSER … &PREFIX*)"
                    );
                });
                Ok(0)
            }
            Err(error) => {
                self.drop_connection(number).await;
                Err(self.in_words(&error))
            }
        }
    }

    /// Listens to a channel, on a connection of its own. The stream ends with the connection.
    pub(crate) async fn listen(&self, channel: &[u8]) -> Result<PubSubStream, RedisError> {
        let listening = async {
            let mut connection = self.client.get_async_pubsub().await?;
            connection.subscribe(channel).await?;
            Ok(connection.into_on_message())
        };
        let late = |_| RedisError::from((ErrorKind::Io, "the store does not answer"));
        tokio::time::timeout(CONNECT_WITHIN, listening)
            .await
            .map_err(late)?
    }

    /// Removes a member of a sorted set.
    pub(crate) async fn remove_member(
        &self,
        key: &[u8],
        member: &[u8],
    ) -> Result<(), JournalError> {
        let mut connection = self.connection().await?;
        let asked = cmd("ZREM").arg(key).arg(member).to_owned();
        let told: Result<u64, RedisError> = asked.query_async(&mut connection.io).await;
        told.map(drop).map_err(|error| self.in_words(&error))
    }

    /// Removes a member of a set.
    pub(crate) async fn remove_of_set(
        &self,
        key: &[u8],
        member: &[u8],
    ) -> Result<(), JournalError> {
        let mut connection = self.connection().await?;
        let asked = cmd("SREM").arg(key).arg(member).to_owned();
        let told: Result<u64, RedisError> = asked.query_async(&mut connection.io).await;
        told.map(drop).map_err(|error| self.in_words(&error))
    }

    /// Removes keys of processes that are gone, or of tests.
    pub(crate) async fn remove(&self, keys: &[Vec<u8>]) -> Result<(), JournalError> {
        let mut connection = self.connection().await?;
        let asked = cmd("DEL").arg(keys).to_owned();
        let told: Result<u64, RedisError> = asked.query_async(&mut connection.io).await;
        told.map(drop).map_err(|error| self.in_words(&error))
    }
}
