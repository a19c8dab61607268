//! The agent's socket: checks who may connect, and answers requests.

use std::rc::Rc;
use std::sync::Arc;

use d2tp::agent_carrier::AgentCarrier;
use serde_json::{Value, json};
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::api::{AgentRequest, PodcastRequest, TermsChange, error_response, ok_response};
use super::api_lines::{next_line, write_line};
use super::idle::ConnectionCount;
use super::page::PagePort;
use super::queue::{self, QUEUED_MAX, SavedDeadline, SavedTransfer, TransferIntent};
use super::sockets;
use super::state::{Agent, AgentEventReceiver, lock};
use super::transfer_task::TransferTask;
use crate::fetch::jobs::{self, JobState};
use crate::fetch::outcome::TransferFailure;
use crate::fetch::upload_body::new_token;
use crate::mirror::MirrorPlan;
use crate::order::{Deadline, TransferOrder, TransferVerb};
use crate::prepared_transfer::PreparedTransfer;

/// Programs that are served at the same time; more wait.
const VISITORS_MAX: usize = 64; // a guess

/// Programs whose own connections the agent schedules at the same time; further ones schedule alone.
const PROGRAMS_MAX: usize = 256; // a guess: descriptors are a thousand

type ApiResult = Result<Value, TransferFailure>;

/// Serves requests of the agent's own user only.
pub(super) async fn serve(
    agent: Arc<Agent>,
    carrier: Rc<AgentCarrier>,
    page: Rc<PagePort>,
    listener: UnixListener,
) {
    let visitors = Arc::new(Semaphore::new(VISITORS_MAX));
    let programs = Rc::new(Semaphore::new(PROGRAMS_MAX));
    loop {
        let Ok(permit) = visitors.clone().acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
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
            tracing::warn!("refused a program of another user");
            continue;
        }
        let (agent, carrier, programs) = (agent.clone(), carrier.clone(), programs.clone());
        let page = page.clone();
        let counted = ConnectionCount::new(agent.clone());
        tokio::task::spawn_local(async move {
            let _counted = counted;
            // A visitor that goes away is none of our business.
            let _ = visit(agent, &carrier, &page, &programs, stream, permit).await;
        });
    }
}

async fn visit(
    agent: Arc<Agent>,
    carrier: &AgentCarrier,
    page: &PagePort,
    programs: &Semaphore,
    stream: UnixStream,
    permit: OwnedSemaphorePermit,
) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read);
    while let Some(line) = next_line(&mut lines).await? {
        let request = match serde_json::from_str::<AgentRequest>(&line) {
            Ok(request) => request,
            Err(error) => {
                let failure = TransferFailure::usage(format!("not a request: {error}"));
                write_line(&mut write, &error_response(&failure)).await?;
                continue;
            }
        };
        match request {
            AgentRequest::Watch { id } => {
                let news = agent.events.subscribe();
                let known = id.map(|id| agent.last_event(id)).transpose();
                match known {
                    Ok(last) => {
                        write_line(&mut write, &ok_response(json!({}))).await?;
                        return listen(&mut write, &mut lines, news, id, last.flatten()).await;
                    }
                    Err(failure) => write_line(&mut write, &error_response(&failure)).await?,
                }
            }
            AgentRequest::Add {
                order,
                patient,
                follow,
            } => {
                // Before it begins: nothing may be missed.
                let news = agent.events.subscribe();
                match agent.add(*order, patient) {
                    Ok((id, answer)) => {
                        write_line(&mut write, &answer).await?;
                        if follow {
                            return listen(&mut write, &mut lines, news, Some(id), None).await;
                        }
                    }
                    Err(failure) => write_line(&mut write, &error_response(&failure)).await?,
                }
            }
            AgentRequest::Socket(call) => {
                // Sockets have a limit of their own.
                drop(permit);
                return sockets::carry_socket(carrier, *call, write, lines).await;
            }
            AgentRequest::Keep(claim) => {
                drop(permit);
                if let Some(stream) = sockets::reopened_connection(&claim, write, lines).await? {
                    carrier.keep(stream, claim).await;
                }
                return Ok(());
            }
            AgentRequest::Reopen(claim) => {
                if let Some(stream) = sockets::reopened_connection(&claim, write, lines).await? {
                    carrier.reopen(stream, claim).await;
                }
                return Ok(());
            }
            AgentRequest::Descriptor(claim) => {
                if let Some(stream) = sockets::reopened_connection(&claim, write, lines).await? {
                    carrier.descriptor(stream, claim).await;
                }
                return Ok(());
            }
            AgentRequest::Schedule => {
                let Ok(_permit) = programs.try_acquire() else {
                    let text = format!("{PROGRAMS_MAX} programs are connected already");
                    let failure = TransferFailure::error(text);
                    return write_line(&mut write, &error_response(&failure)).await;
                };
                drop(permit);
                return agent.schedule(&mut write, &mut lines).await;
            }
            AgentRequest::Stream { ordered } => match agent.stream(&ordered).await {
                Ok(serving) => return agent.show_stream(serving, &mut write, &mut lines).await,
                Err(failure) => write_line(&mut write, &error_response(&failure)).await?,
            },
            AgentRequest::Page { new_link, entry } => {
                let link = page.link(new_link, entry).await.map(ok_response);
                let answer = link.unwrap_or_else(|failure| error_response(&failure));
                write_line(&mut write, &answer).await?;
            }
            AgentRequest::Cast(PodcastRequest::Play {
                episode,
                policy,
                again,
            }) => {
                let played = agent.play_episode(page, episode, policy.as_deref(), again);
                let answer = played.await.map(ok_response);
                let answer = answer.unwrap_or_else(|failure| error_response(&failure));
                write_line(&mut write, &answer).await?;
            }
            AgentRequest::Cast(request) => {
                let answer = agent.answer_podcasts(request).await;
                let answer = answer.unwrap_or_else(|failure| error_response(&failure));
                write_line(&mut write, &answer).await?;
            }
            AgentRequest::PageClose => {
                let closed = page.close().await.map(ok_response);
                let answer = closed.unwrap_or_else(|failure| error_response(&failure));
                write_line(&mut write, &answer).await?;
            }
            request => {
                let answer = agent
                    .answer(request)
                    .unwrap_or_else(|failure| error_response(&failure));
                write_line(&mut write, &answer).await?;
            }
        }
    }
    Ok(())
}

/// Sends the events of one transfer until it ends, or of all until the subscriber disconnects.
async fn listen(
    write: &mut OwnedWriteHalf,
    lines: &mut BufReader<OwnedReadHalf>,
    mut news: AgentEventReceiver,
    id: Option<u64>,
    last: Option<Value>,
) -> std::io::Result<()> {
    let is_end = |event: &Value| matches!(event["event"].as_str(), Some("done" | "error"));
    if let Some(last) = last {
        write_line(write, &last).await?;
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
        write_line(write, &event).await?;
        if id.is_some() && is_end(&event) {
            return Ok(());
        }
    }
}

impl Agent {
    fn answer(self: &Arc<Agent>, request: AgentRequest) -> ApiResult {
        Ok(match request {
            AgentRequest::Hello => ok_response(json!({
                "agent": env!("CARGO_PKG_VERSION"),
                "pid": std::process::id(),
                "scheduler": self.scheduler.kind().as_str(),
            })),
            AgentRequest::List => ok_response(json!({"transfers": self.list()})),
            AgentRequest::Clear => ok_response(json!({"transfers": self.clear()?})),
            AgentRequest::Status { id } | AgentRequest::Why { id } => ok_response(self.show(id)?),
            AgentRequest::Pause { id } => self.set_intent(id, TransferIntent::Pause)?,
            AgentRequest::Resume { id } => self.resume(id, false)?,
            AgentRequest::Cancel { id } => self.set_intent(id, TransferIntent::Cancel)?,
            AgentRequest::Retry { id } => self.resume(id, true)?,
            AgentRequest::Edit { id, terms } => self.edit(id, &terms)?,
            AgentRequest::Net => ok_response(json!({"links": self.net()})),
            AgentRequest::NetSet { link, class } => {
                let network = self
                    .link_view
                    .set_cost(&link, &class)
                    .map_err(TransferFailure::usage)?;
                ok_response(json!({"link": link, "network": network, "class": class}))
            }
            AgentRequest::Budget => ok_response(self.budget()),
            AgentRequest::BudgetSet {
                cap,
                no_cap,
                reset_day,
                cutoff,
            } => {
                if reset_day.is_some_and(|day| !(1..=31).contains(&day)) {
                    return Err(TransferFailure::usage("a day of the month is 1 to 31"));
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
                self.update_allowance();
                ok_response(self.budget())
            }
            AgentRequest::Add { .. }
            | AgentRequest::Watch { .. }
            | AgentRequest::Stream { .. }
            | AgentRequest::Page { .. }
            | AgentRequest::PageClose
            | AgentRequest::Cast(_)
            | AgentRequest::Schedule
            | AgentRequest::Socket(_)
            | AgentRequest::Keep(_)
            | AgentRequest::Reopen(_)
            | AgentRequest::Descriptor(_) => {
                unreachable!("these are answered where they are read")
            }
        })
    }

    pub(super) fn add(
        self: &Arc<Agent>,
        mut order: TransferOrder,
        patient: bool,
    ) -> Result<(u64, Value), TransferFailure> {
        let running = lock(&self.tasks)
            .values()
            .filter(|task| !task.has_ended())
            .count();
        if running >= QUEUED_MAX {
            let text = format!("the queue is full ({QUEUED_MAX} transfers); cancel some");
            return Err(TransferFailure::error(text));
        }
        let relative = [
            &order.file,
            &order.folder,
            &order.ca,
            &order.key,
            &order.netrc,
            &order.cookies,
        ];
        if let Some(path) = relative.into_iter().flatten().find(|p| p.is_relative()) {
            let text = format!("{} does not begin at the root", path.display());
            return Err(TransferFailure::usage(text));
        }
        if order.verb == TransferVerb::Get && order.file.is_none() && order.folder.is_none() {
            return Err(TransferFailure::usage("name where it goes: file or folder"));
        }
        // What makes no sense is said now, and nothing is taken.
        let prepared = PreparedTransfer::prepare(&order, order.job()?, false)?;
        refuse_past(order.deadline)?;
        if order.mirror.is_some() {
            MirrorPlan::of(&order)?;
            if order.verb == TransferVerb::Get
                && let Some(other) = self.other_mirror_into(&order)
            {
                let text = format!(
                    "transfer {other} mirrors into this folder already; `cedos retry {other}` runs one that is \
                     scheduled now, and `cedos cancel {other}` ends it"
                );
                return Err(TransferFailure::usage(text));
            }
        } else {
            prepared.job.refuse_existing()?;
            prepared.job.check_destination()?;
        }
        if order.recurrence()?.is_some() && order.verb == TransferVerb::Get && order.file.is_none()
        {
            return Err(TransferFailure::usage(
                "a download that recurs needs the name of its file",
            ));
        }
        if order.verb == TransferVerb::Put && order.token.is_none() && order.mirror.is_none() {
            order.token = Some(new_token());
        }
        let kept = SavedTransfer::new(order, patient)?;
        let record =
            queue::add(kept).map_err(|error| TransferFailure::error(format!("{error:#}")))?;
        let id = record.id;
        let (file, url) = (record.request.file.clone(), record.request.url.clone());
        let first_run = record.saved.first_run();
        lock(&self.tasks).insert(id, TransferTask::new(record));
        self.start(id);
        let mut answer = json!({"id": id, "file": file, "url": url});
        if let Some((starts, due)) = first_run {
            (answer["starts"], answer["due"]) = (starts.into(), due.into());
        }
        Ok((id, ok_response(answer)))
    }

    fn last_event(&self, id: u64) -> Result<Option<Value>, TransferFailure> {
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

    /// Forgets the transfers that have ended. Returns them.
    pub(super) fn clear(&self) -> Result<Vec<Value>, TransferFailure> {
        let mut tasks = lock(&self.tasks);
        let ended: Vec<u64> = (tasks.iter())
            .filter(|(_, task)| task.has_ended() && !task.running)
            .map(|(id, _)| *id)
            .collect();
        let cleared = jobs::clear_with(&ended);
        let cleared = cleared.map_err(|error| TransferFailure::error(format!("{error:#}")))?;
        let show = |job: jobs::BackgroundJob| match tasks.remove(&job.id) {
            Some(task) => self.transfer_json(job.id, &task),
            None => job.to_json(),
        };
        Ok(cleared.into_iter().map(show).collect())
    }

    pub(super) fn show(&self, id: u64) -> Result<Value, TransferFailure> {
        if let Some(task) = lock(&self.tasks).get(&id) {
            return Ok(self.transfer_json(id, task));
        }
        let job = jobs::find(id).map_err(|_| unknown(id))?;
        Ok(job.to_json())
    }

    /// Sets what the user wants of a transfer that has not ended.
    pub(super) fn set_intent(self: &Arc<Agent>, id: u64, wish: TransferIntent) -> ApiResult {
        let stands = {
            let mut tasks = lock(&self.tasks);
            let task = tasks.get_mut(&id).ok_or_else(|| not_ours(id))?;
            if task.has_ended() {
                let text = match task.state_name() {
                    "done" => format!("transfer {id} is complete"),
                    "cancelled" => {
                        format!("transfer {id} has ended; `cedos retry {id}` resumes it")
                    }
                    state => format!("transfer {id} has {state}; `cedos retry {id}` resumes it"),
                };
                return Err(TransferFailure::error(text));
            }
            task.saved.wish = wish;
            keep(id, &task.saved)?;
            task.request_stop();
            !task.running
        };
        if stands {
            let event = match wish {
                TransferIntent::Pause => json!({"event": "paused", "reason": "user_paused"}),
                TransferIntent::Cancel => {
                    json!({"event": "error", "exit": 3, "reason": "user_paused",
                                       "text": "stopped"})
                }
                TransferIntent::Run => json!({"event": "queued"}),
            };
            self.send_event(id, event);
        }
        self.show(id).map(ok_response)
    }

    /// Resumes a paused transfer, or restarts one that ended.
    pub(super) fn resume(self: &Arc<Agent>, id: u64, again: bool) -> ApiResult {
        let is_scheduled = |task: &TransferTask| task.state_name() == "scheduled";
        if again && lock(&self.tasks).get(&id).is_some_and(is_scheduled) {
            self.run_now(id)?;
            return self.show(id).map(ok_response);
        }
        {
            let mut tasks = lock(&self.tasks);
            let task = tasks.get_mut(&id).ok_or_else(|| not_ours(id))?;
            let refuse = match (task.state_name(), again) {
                ("done", _) => Some("is complete"),
                ("failed" | "cancelled", false) => Some("has ended; `cedos retry` starts it again"),
                ("failed" | "cancelled", true) | (_, false) => None,
                (_, true) => Some("has not ended"),
            };
            if let Some(refuse) = refuse {
                return Err(TransferFailure::error(format!("transfer {id} {refuse}")));
            }
            task.saved.wish = TransferIntent::Run;
            if again && task.saved.order.post {
                // Who asks for it again means another one.
                task.saved.order.token = Some(new_token());
            }
            keep(id, &task.saved)?;
        }
        self.send_event(id, json!({"event": "queued"}));
        self.start(id);
        self.show(id).map(ok_response)
    }

    /// Changes terms, which apply from the next epoch on.
    pub(super) fn edit(self: &Arc<Agent>, id: u64, change: &TermsChange) -> ApiResult {
        {
            let mut tasks = lock(&self.tasks);
            let task = tasks.get_mut(&id).ok_or_else(|| not_ours(id))?;
            if task.state_name() == "done" {
                return Err(TransferFailure::error(format!("transfer {id} is complete")));
            }
            if task.recurs() && (change.deadline.is_some() || change.no_deadline) {
                let text = format!(
                    "transfer {id} recurs, so its deadlines are those of its schedule; to change it, cancel {id} \
                     and run the command with another --every"
                );
                return Err(TransferFailure::usage(text));
            }
            refuse_past(change.deadline)?;
            let mut kept = task.saved.clone();
            change.apply(&mut kept.order);
            if change.no_deadline {
                kept.due = None;
            }
            if let Some(deadline) = change.deadline {
                kept.due = Some(SavedDeadline::of(deadline.due()));
            }
            kept.terms(0)?;
            keep(id, &kept)?;
            task.request.deadline = (kept.due.as_ref()).map(|due| queue::whole_seconds(due.at));
            task.saved = kept;
            task.apply_saved()?;
        }
        self.show(id).map(ok_response)
    }
}

/// Refuses a deadline that has passed.
fn refuse_past(deadline: Option<Deadline>) -> Result<(), TransferFailure> {
    match deadline.is_some_and(Deadline::has_passed) {
        true => Err(TransferFailure::usage(
            "that time has passed; give one in the future",
        )),
        false => Ok(()),
    }
}

fn keep(id: u64, kept: &SavedTransfer) -> Result<(), TransferFailure> {
    queue::save(id, kept)
        .map_err(|error| TransferFailure::error(format!("cannot write the queue: {error:#}")))
}

/// The failure for a transfer that is not in the agent's queue.
fn not_ours(id: u64) -> TransferFailure {
    let Ok(job) = jobs::find(id) else {
        return unknown(id);
    };
    TransferFailure::error(match job.state() {
        JobState::Done => format!("transfer {id} is complete"),
        JobState::Failed | JobState::Cancelled | JobState::Gone => {
            format!("transfer {id} has ended; run the same command to resume")
        }
        JobState::Running
        | JobState::Waiting
        | JobState::Paused
        | JobState::Scheduled
        | JobState::Queued => format!(
            "transfer {id} runs in its own process, not in the agent. Only `cedos status {id}` and `cedos \
             cancel {id}` work for it"
        ),
    })
}

fn unknown(id: u64) -> TransferFailure {
    TransferFailure::error(format!("there is no transfer {id}; `cedos ls` lists them"))
}
