//! The agent's socket: who may come in, and what is done for them.

use std::rc::Rc;
use std::sync::Arc;

use d2tp::agent_carrier::AgentCarrier;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};

use super::api::{Change, LINE_BYTES_MAX, Request, no, yes_with};
use super::queue::{self, Anchor, Kept, QUEUED_MAX, Wish};
use super::task::Task;
use super::{Agent, lock, sockets};
use crate::errand::Errand;
use crate::fetch::jobs::{self, Standing};
use crate::fetch::outcome::Failure;
use crate::fetch::parcel::new_token;
use crate::order::{Deadline, Order, Verb};

/// Programs that are answered at the same time; more wait.
const VISITORS_MAX: usize = 64; // a guess

type Answer = Result<Value, Failure>;
type Ear = broadcast::Receiver<(u64, Value)>;

/// Lets in the user whose agent this is, and nobody else.
pub(super) async fn serve(agent: Arc<Agent>, carrier: Rc<AgentCarrier>, listener: UnixListener) {
    let visitors = Arc::new(Semaphore::new(VISITORS_MAX));
    loop {
        let Ok(permit) = visitors.clone().acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "nobody can come in");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                continue;
            }
        };
        // The mode of the socket says so too; not every system heeds it.
        let is_ours = |stream: &UnixStream| {
            stream
                .peer_cred()
                .is_ok_and(|peer| peer.uid() == nix::unistd::geteuid().as_raw())
        };
        if !is_ours(&stream) {
            tracing::warn!("somebody else's program was turned away");
            continue;
        }
        let (agent, carrier) = (agent.clone(), carrier.clone());
        tokio::task::spawn_local(async move {
            // A visitor that goes away is none of our business.
            let _ = visit(agent, &carrier, stream, permit).await;
        });
    }
}

async fn visit(
    agent: Arc<Agent>,
    carrier: &AgentCarrier,
    stream: UnixStream,
    permit: OwnedSemaphorePermit,
) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read);
    while let Some(line) = next_line(&mut lines).await? {
        let request = match serde_json::from_str::<Request>(&line) {
            Ok(request) => request,
            Err(error) => {
                let failure = Failure::usage(format!("that is no request: {error}"));
                say(&mut write, &no(&failure)).await?;
                continue;
            }
        };
        match request {
            Request::Watch { id } => {
                let news = agent.news.subscribe();
                let known = id.map(|id| agent.last_event(id)).transpose();
                match known {
                    Ok(last) => {
                        say(&mut write, &yes_with(json!({}))).await?;
                        return listen(&mut write, &mut lines, news, id, last.flatten()).await;
                    }
                    Err(failure) => say(&mut write, &no(&failure)).await?,
                }
            }
            Request::Add {
                order,
                patient,
                follow,
            } => {
                // Before it begins: nothing may be missed.
                let news = agent.news.subscribe();
                match agent.add(*order, patient) {
                    Ok((id, answer)) => {
                        say(&mut write, &answer).await?;
                        if follow {
                            return listen(&mut write, &mut lines, news, Some(id), None).await;
                        }
                    }
                    Err(failure) => say(&mut write, &no(&failure)).await?,
                }
            }
            Request::Socket(call) => {
                // Sockets have a limit of their own.
                drop(permit);
                return sockets::carry(carrier, *call, write, lines).await;
            }
            Request::Keep(claim) => {
                drop(permit);
                if let Some(stream) = sockets::alone(&claim, write, lines).await? {
                    carrier.keep(stream, claim).await;
                }
                return Ok(());
            }
            Request::Reopen(claim) => {
                if let Some(stream) = sockets::alone(&claim, write, lines).await? {
                    carrier.reopen(stream, claim).await;
                }
                return Ok(());
            }
            Request::Descriptor(claim) => {
                if let Some(stream) = sockets::alone(&claim, write, lines).await? {
                    carrier.descriptor(stream, claim).await;
                }
                return Ok(());
            }
            Request::Stream { ordered } => match agent.stream(&ordered).await {
                Ok(serving) => return agent.show_stream(serving, &mut write, &mut lines).await,
                Err(failure) => say(&mut write, &no(&failure)).await?,
            },
            request => {
                let answer = agent.answer(request).unwrap_or_else(|failure| no(&failure));
                say(&mut write, &answer).await?;
            }
        }
    }
    Ok(())
}

pub(super) async fn next_line(
    lines: &mut BufReader<OwnedReadHalf>,
) -> std::io::Result<Option<String>> {
    let mut line = Vec::new();
    loop {
        let piece = lines.fill_buf().await?;
        if piece.is_empty() {
            return Ok(None);
        }
        let end = piece.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(piece.len(), |end| end + 1);
        line.extend_from_slice(&piece[..taken]);
        lines.consume(taken);
        if line.len() > LINE_BYTES_MAX {
            return Err(std::io::Error::other("a line without end"));
        }
        if end.is_some() {
            return Ok(Some(String::from_utf8_lossy(&line).into_owned()));
        }
    }
}

pub(super) async fn say(write: &mut OwnedWriteHalf, value: &Value) -> std::io::Result<()> {
    write.write_all(format!("{value}\n").as_bytes()).await
}

/// Tells what happens, of one transfer until it ends, or of all until the listener goes.
async fn listen(
    write: &mut OwnedWriteHalf,
    lines: &mut BufReader<OwnedReadHalf>,
    mut news: Ear,
    id: Option<u64>,
    last: Option<Value>,
) -> std::io::Result<()> {
    let is_end = |event: &Value| matches!(event["event"].as_str(), Some("done" | "error"));
    if let Some(last) = last {
        say(write, &last).await?;
        if is_end(&last) {
            return Ok(());
        }
    }
    loop {
        let (of, event) = tokio::select! {
            heard = news.recv() => match heard {
                Ok(heard) => heard,
                // What stands there last matters, not what was missed.
                Err(RecvError::Lagged(_)) => continue,
                Err(RecvError::Closed) => return Ok(()),
            },
            // It says no more; that it goes is heard.
            line = next_line(lines) => match line? {
                Some(_) => continue,
                None => return Ok(()),
            },
        };
        if id.is_some_and(|id| id != of) {
            continue;
        }
        say(write, &event).await?;
        if id.is_some() && is_end(&event) {
            return Ok(());
        }
    }
}

impl Agent {
    fn answer(self: &Arc<Agent>, request: Request) -> Answer {
        Ok(match request {
            Request::Hello => yes_with(json!({
                "agent": env!("CARGO_PKG_VERSION"),
                "pid": std::process::id(),
                "scheduler": self.dispatcher.kind().word(),
            })),
            Request::List => yes_with(json!({"transfers": self.list()})),
            Request::Status { id } | Request::Why { id } => yes_with(self.show(id)?),
            Request::Pause { id } => self.wish(id, Wish::Pause)?,
            Request::Resume { id } => self.resume(id, false)?,
            Request::Cancel { id } => self.wish(id, Wish::Cancel)?,
            Request::Retry { id } => self.resume(id, true)?,
            Request::Edit { id, terms } => self.edit(id, &terms)?,
            Request::Net => yes_with(json!({"links": self.net()})),
            Request::NetSet { link, class } => {
                let network = self.roads.set(&link, &class).map_err(Failure::usage)?;
                yes_with(json!({"link": link, "network": network, "class": class}))
            }
            Request::Budget => yes_with(self.budget()),
            Request::BudgetSet {
                cap,
                no_cap,
                reset_day,
                cutoff,
            } => {
                if reset_day.is_some_and(|day| !(1..=31).contains(&day)) {
                    return Err(Failure::usage("a day of the month is 1 to 31"));
                }
                let cap = match no_cap {
                    true => Some(None),
                    false => cap.map(Some),
                };
                {
                    let mut ledger = lock(&self.ledger);
                    ledger.set(cap, reset_day, cutoff);
                    ledger.save();
                }
                self.allow();
                yes_with(self.budget())
            }
            Request::Add { .. }
            | Request::Watch { .. }
            | Request::Stream { .. }
            | Request::Socket(_)
            | Request::Keep(_)
            | Request::Reopen(_)
            | Request::Descriptor(_) => {
                unreachable!("these are answered where they are read")
            }
        })
    }

    fn add(self: &Arc<Agent>, mut order: Order, patient: bool) -> Result<(u64, Value), Failure> {
        let running = lock(&self.tasks)
            .values()
            .filter(|task| !task.has_ended())
            .count();
        if running >= QUEUED_MAX {
            let text = format!("{QUEUED_MAX} transfers wait already; cancel some");
            return Err(Failure::error(text));
        }
        let relative = [&order.file, &order.folder, &order.ca, &order.key];
        if let Some(path) = relative.into_iter().flatten().find(|p| p.is_relative()) {
            let text = format!("{} does not begin at the root", path.display());
            return Err(Failure::usage(text));
        }
        if order.verb == Verb::Get && order.file.is_none() && order.folder.is_none() {
            return Err(Failure::usage("say where it goes: file, or folder"));
        }
        // What makes no sense is said now, and nothing is taken.
        let errand = Errand::prepare(&order, order.job()?, false)?;
        errand.job.refuse_existing()?;
        refuse_past(order.deadline)?;
        errand.job.check_place()?;
        if order.verb == Verb::Put && order.token.is_none() {
            order.token = Some(new_token());
        }
        let kept = Kept::new(order, patient)?;
        let record = queue::add(kept).map_err(|error| Failure::error(format!("{error:#}")))?;
        let id = record.id;
        let (file, url) = (record.asked.file.clone(), record.asked.url.clone());
        lock(&self.tasks).insert(id, Task::new(record));
        self.begin(id);
        Ok((id, yes_with(json!({"id": id, "file": file, "url": url}))))
    }

    fn last_event(&self, id: u64) -> Result<Option<Value>, Failure> {
        if let Some(task) = lock(&self.tasks).get(&id) {
            return Ok((!task.event.is_null()).then(|| task.event.clone()));
        }
        // What ended under an earlier agent is known by its last word.
        match jobs::find(id) {
            Ok(job) if job.has_ended() => {
                let mut event = job.event;
                if let Some(fields) = event.as_object_mut() {
                    fields.insert("id".to_owned(), id.into());
                }
                Ok(Some(event))
            }
            _ => Err(not_ours(id)),
        }
    }

    fn show(&self, id: u64) -> Result<Value, Failure> {
        if let Some(task) = lock(&self.tasks).get(&id) {
            return Ok(self.object(id, task));
        }
        let job = jobs::find(id).map_err(|_| unknown(id))?;
        Ok(job.object())
    }

    /// What the user wants of one that goes on.
    pub(super) fn wish(self: &Arc<Agent>, id: u64, wish: Wish) -> Answer {
        let stands = {
            let mut tasks = lock(&self.tasks);
            let task = tasks.get_mut(&id).ok_or_else(|| not_ours(id))?;
            if task.has_ended() {
                let text = format!("{id} has ended ({})", task.standing());
                return Err(Failure::error(text));
            }
            task.kept.wish = wish;
            keep(id, &task.kept)?;
            task.halt();
            !task.running
        };
        if stands {
            let event = match wish {
                Wish::Pause => json!({"event": "paused", "reason": "user_paused"}),
                Wish::Cancel => json!({"event": "error", "exit": 3, "reason": "user_paused",
                                       "text": "stopped"}),
                Wish::Run => json!({"event": "queued"}),
            };
            self.tell(id, event);
        }
        self.show(id).map(yes_with)
    }

    /// Goes on with one that was paused, or begins again with one that ended.
    pub(super) fn resume(self: &Arc<Agent>, id: u64, again: bool) -> Answer {
        {
            let mut tasks = lock(&self.tasks);
            let task = tasks.get_mut(&id).ok_or_else(|| not_ours(id))?;
            let refuse = match (task.standing(), again) {
                ("done", _) => Some("is whole"),
                ("failed" | "cancelled", false) => Some("has ended; cedos retry begins again"),
                ("failed" | "cancelled", true) | (_, false) => None,
                (_, true) => Some("has not ended"),
            };
            if let Some(refuse) = refuse {
                return Err(Failure::error(format!("{id} {refuse}")));
            }
            task.kept.wish = Wish::Run;
            if again && task.kept.order.post {
                // Who asks for it again means another one.
                task.kept.order.token = Some(new_token());
            }
            keep(id, &task.kept)?;
        }
        self.tell(id, json!({"event": "queued"}));
        self.begin(id);
        self.show(id).map(yes_with)
    }

    /// Other terms, which hold from the next epoch on.
    pub(super) fn edit(self: &Arc<Agent>, id: u64, change: &Change) -> Answer {
        {
            let mut tasks = lock(&self.tasks);
            let task = tasks.get_mut(&id).ok_or_else(|| not_ours(id))?;
            if task.standing() == "done" {
                return Err(Failure::error(format!("{id} is whole")));
            }
            refuse_past(change.deadline)?;
            let mut kept = task.kept.clone();
            change.apply(&mut kept.order);
            if change.no_deadline {
                kept.due = None;
            }
            if let Some(deadline) = change.deadline {
                kept.due = Some(Anchor::of(deadline.due()));
            }
            kept.terms(0)?;
            keep(id, &kept)?;
            task.asked.deadline = (kept.due.as_ref()).map(|due| queue::whole_seconds(due.at));
            task.kept = kept;
            task.adopt()?;
        }
        self.show(id).map(yes_with)
    }
}

/// A deadline lies in the future.
fn refuse_past(deadline: Option<Deadline>) -> Result<(), Failure> {
    match deadline.is_some_and(Deadline::has_passed) {
        true => Err(Failure::usage(
            "that has passed; a deadline lies in the future",
        )),
        false => Ok(()),
    }
}

fn keep(id: u64, kept: &Kept) -> Result<(), Failure> {
    queue::keep(id, kept)
        .map_err(|error| Failure::error(format!("the queue cannot be written: {error:#}")))
}

/// Why nothing can be done with one that is not in the queue.
fn not_ours(id: u64) -> Failure {
    let Ok(job) = jobs::find(id) else {
        return unknown(id);
    };
    Failure::error(match job.standing() {
        Standing::Done => format!("{id} is whole"),
        Standing::Failed | Standing::Cancelled | Standing::Gone => {
            format!("{id} has ended; the same command continues")
        }
        Standing::Running | Standing::Waiting | Standing::Paused | Standing::Queued => format!(
            "{id} is another process's, not the agent's: it can be looked at (cedos status {id}) and \
             cancelled, not followed, paused or edited"
        ),
    })
}

fn unknown(id: u64) -> Failure {
    Failure::error(format!(
        "there is no transfer {id}; `cedos ls` lists those there are"
    ))
}
