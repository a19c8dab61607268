//! A podcast app's request for one of its links: a feed, rewritten so that its enclosures are links too, or an episode.
//!
//! ```text
//!  GET /feeds/TOKEN/SEALED ─▶ whose, and what ─┬─ feed ────▶ fetched, rewritten ─▶ its enclosures are links
//!                                              └─ episode ─▶ the client's copy, or a new one ─▶ a part of it
//!                                                             └── kept for `feeds_keep` after its last use
//! ```
//!
//! An origin may insert other advertisements into an episode at each request. The copy is fetched once, and whatever an
//! app asks of the link comes from it. Logs show neither links nor what they lead to.

use std::sync::Arc;
use std::time::Duration;

use cedos_feed::{FeedError, rewrite_feed};
use cedos_sandbox::confined;
use d2tp_driver::{FlowIo, HostKey, MemoryCharge, ResetCause};
use http::header::{self, HeaderValue};
use http::{HeaderMap, StatusCode};
use url::Url;

use crate::answer::{self, AnswerSource};
use crate::cached_fetch::{FetchedAnswer, OpenedCopy, link_fields};
use crate::copy_answer::prepare_copy;
use crate::counters::TrafficKind;
use crate::feed_links::{FeedLink, FeedLinkKind};
use crate::flow_answer::{AnswerPart, MemoState, refuse, send};
use crate::flow_report::{FlowLogRecord, ProxFlowOutcome, ServedFrom};
use crate::flow_watch::FlowWatch;
use crate::link_keys::guest_address_of;
use crate::link_request::LinkRequest;
use crate::link_state::LINK_GUESTS_MAX;
use crate::metered_flow::MeteredFlow;
use crate::pinned_copy::PinnedCopy;
use crate::prox::Prox;
use crate::refusal::ProxRefusal;
use crate::request;
use crate::request_head::{RequestHeadError, read_head};
use crate::spooled_body::{SpoolReadError, SpoolStatus};

/// How long the head of a request may take. Apps send it at once.
const HEAD_WITHIN: Duration = Duration::from_secs(10); // a guess

/// The maximum number of bytes of a feed that is rewritten.
const LINKED_FEED_BYTES_MAX: usize = 16 << 20; // a guess: 10,000 episodes with long notes

/// How often the time of a kept copy is renewed at most: players ask for many parts.
const RENEWED_EVERY: Duration = Duration::from_secs(60); // a guess: little beside a day

/// How often a feed is in memory while it is rewritten: as it came, and as it is written.
const FEED_COPIES: u64 = 3; // the written one is reserved with the size of the other, and grows to twice that

/// Bytes of a feed's copy that are read at once.
const READ_BYTES: usize = 256 * 1024;

/// Why there is no answer.
enum LinkFault {
    Refused(ProxRefusal),
    /// The flow is over.
    Over(ProxFlowOutcome),
}

impl From<ProxRefusal> for LinkFault {
    fn from(refusal: ProxRefusal) -> LinkFault {
        LinkFault::Refused(refusal)
    }
}

/// Serves a flow whose client its link says.
pub(crate) async fn serve<F: FlowIo>(
    flow: &mut MeteredFlow<F>,
    prox: &Arc<Prox>,
    record: &mut FlowLogRecord,
) -> ProxFlowOutcome {
    let mut watch = FlowWatch::new(prox, &record.traffic);
    let mut head_memory = prox.memory_account(flow.peer()).charge();
    let (request, link) = match read_link(flow, prox, &mut head_memory).await {
        Ok(read) => read,
        Err(LinkFault::Refused(refusal)) => {
            return refuse(flow, prox, &mut watch, record, &refusal, false).await;
        }
        Err(LinkFault::Over(outcome)) => return outcome,
    };
    let guest = flow.peer();
    let client = link.client;
    let traffic = prox.traffic.flow(client);
    flow.belongs_to(client, traffic.clone());
    record.traffic = traffic;
    record.asked = match link.kind {
        FeedLinkKind::Feed => "a linked feed".to_owned(),
        FeedLinkKind::Episode => "a linked episode".to_owned(),
    };
    watch = FlowWatch::new(prox, &record.traffic);
    prox.traffic.on_flow_ended(&guest, false);
    if prox.clients.name_of(&client).is_none() {
        let refusal = ProxRefusal::LinkWithdrawn;
        return refuse(flow, prox, &mut watch, record, &refusal, request.head_only).await;
    }
    let permit = match prox.admit(client, None).await {
        Ok(permit) => permit,
        Err(refusal) => {
            return refuse(flow, prox, &mut watch, record, &refusal, request.head_only).await;
        }
    };
    // From now on the flow ends when the client's month is used up; a refusal does not.
    record.traffic.set_kind(TrafficKind::Fetch);
    let exchange = LinkExchange {
        flow,
        prox,
        watch: &mut watch,
        record,
        request: &request,
        link: &link,
    };
    let outcome = tokio::select! {
        outcome = exchange.answer() => outcome,
        () = prox.clients.until_removed(&client) => {
            ProxFlowOutcome::Broken("the client was removed".to_owned())
        }
    };
    prox.settle_permit(permit, &outcome);
    outcome
}

/// Reads the request, and what its link leads to.
async fn read_link<F: FlowIo>(
    flow: &mut F,
    prox: &Prox,
    memory: &mut MemoryCharge,
) -> Result<(LinkRequest, FeedLink), LinkFault> {
    let Some(_guest) = prox.link_state.guest() else {
        return Err(ProxRefusal::FlowsFull(LINK_GUESTS_MAX as u32).into());
    };
    let within = HEAD_WITHIN.min(prox.config().request_timeout);
    let head = tokio::select! {
        head = read_head(flow, within, memory) => head,
        () = prox.stop.cancelled() => {
            return Err(LinkFault::Over(ProxFlowOutcome::Reset(ResetCause::Stopping)));
        }
    };
    let head = match head {
        Ok(head) => head,
        Err(RequestHeadError::Gone(error)) => {
            return Err(LinkFault::Over(ProxFlowOutcome::Broken(error.to_string())));
        }
        Err(RequestHeadError::Refused(refusal)) => return Err(refusal.into()),
    };
    let request = LinkRequest::parse(&head)?;
    let link = prox
        .links()
        .and_then(|(links, base)| links.read(&base, &request.path));
    match link {
        Some(link) => Ok((request, link)),
        // Who may use the proxy is told how.
        None if guest_address_of(&flow.peer()).is_some_and(|at| prox.config().admits(at)) => {
            let refusal = request::parse(&head).err();
            Err(refusal.unwrap_or(ProxRefusal::LinkUnknown).into())
        }
        None => Err(ProxRefusal::LinkUnknown.into()),
    }
}

/// A request for a link whose flow is admitted, and what answers it.
struct LinkExchange<'a, F> {
    flow: &'a mut F,
    prox: &'a Arc<Prox>,
    watch: &'a mut FlowWatch,
    record: &'a mut FlowLogRecord,
    request: &'a LinkRequest,
    link: &'a FeedLink,
}

impl<F: FlowIo> LinkExchange<'_, F> {
    async fn answer(mut self) -> ProxFlowOutcome {
        let answered = match self.link.kind {
            FeedLinkKind::Feed => self.answer_feed().await,
            FeedLinkKind::Episode => self.answer_episode().await,
        };
        match answered {
            Ok(outcome) | Err(LinkFault::Over(outcome)) => outcome,
            Err(LinkFault::Refused(refusal)) => {
                let head_only = self.request.head_only;
                refuse(
                    self.flow,
                    self.prox,
                    self.watch,
                    self.record,
                    &refusal,
                    head_only,
                )
                .await
            }
        }
    }

    /// Sends an answer that is all in memory.
    async fn send_whole(&mut self, status: StatusCode, answer: Vec<u8>) -> ProxFlowOutcome {
        self.record.status = Some(status.as_u16());
        self.send(AnswerSource::head_only(answer), None).await
    }

    async fn send(
        &mut self,
        source: AnswerSource,
        part: Option<AnswerPart<'_>>,
    ) -> ProxFlowOutcome {
        let never = MemoState::Never;
        send(
            self.flow,
            self.prox,
            self.watch,
            self.record,
            source,
            part,
            never,
        )
        .await
    }

    /// Answers with an episode from the client's copy.
    async fn answer_episode(&mut self) -> Result<ProxFlowOutcome, LinkFault> {
        let (prox, client) = (self.prox, self.link.client);
        let mut fetch = self.request.fetch(&self.link.url, self.request.head_only);
        let turn = prox.link_state.turn(client, fetch.url.as_str());
        let opening = async {
            let _alone = turn.lock().await;
            if let Some(copy) = prox.retained.latest(client, fetch.url.as_str()) {
                return Ok((FetchedAnswer::Copy(OpenedCopy::pinned(copy)), false));
            }
            let opened = prox.open(client, &fetch).await?;
            if let FetchedAnswer::Copy(opened) = &opened {
                list_copy(prox, client, fetch.url.as_str(), &opened.copy);
            }
            Ok((opened, true))
        };
        let opened = tokio::select! {
            opened = opening => opened,
            gone = self.watch.gone(self.flow, prox) => return Err(LinkFault::Over(gone.outcome())),
        };
        let (opened, is_new) = opened.map_err(LinkFault::Refused)?;
        self.record.served = ServedFrom::Origin;
        let opened = match opened {
            FetchedAnswer::Copy(opened) => opened.for_link(),
            // What an origin says of one body is not true of the next: its length is left out.
            FetchedAnswer::HeadOnly { head, .. } => {
                let answer = answer::link_head(head.status, link_fields(&head.headers), None);
                return Ok(self.send_whole(head.status, answer).await);
            }
            FetchedAnswer::BareCopy { opened, .. } => {
                let head = &opened.copy.head;
                let answer = answer::link_head(head.status, link_fields(&head.headers), None);
                return Ok(self.send_whole(head.status, answer).await);
            }
        };
        self.record.served = opened.served;
        let copy = opened.copy.clone();
        if self.request.head_only {
            let answer = answer::bare_copy_head(&opened, false, false);
            let outcome = self.send_whole(copy.head.status, answer).await;
            keep_copy(prox, client, copy);
            return Ok(outcome);
        }
        fetch.range = self.request.range_of(&copy.link_tag(), is_new);
        let prepared =
            prepare_copy(self.flow, prox, self.watch, self.record, &fetch, &opened).await;
        let outcome = match prepared {
            Ok((source, part)) => {
                let answer = AnswerPart {
                    copy: &part.copy,
                    end: part.end,
                    reports_to: None,
                    unrecorded: None,
                };
                self.send(source, Some(answer)).await
            }
            Err(outcome) => outcome,
        };
        drop(opened);
        keep_copy(prox, client, copy);
        Ok(outcome)
    }

    /// Answers with a feed, whose enclosures are links.
    async fn answer_feed(&mut self) -> Result<ProxFlowOutcome, LinkFault> {
        let (prox, request, link) = (self.prox, self.request, self.link);
        self.record.served = ServedFrom::Origin;
        let mut memory = prox.memory_account(link.client).charge();
        let making = async {
            let body = fetch_feed(prox, request, link, &mut memory).await?;
            rewrite(prox, link, body).await
        };
        let text = tokio::select! {
            text = making => text?,
            gone = self.watch.gone(self.flow, prox) => return Err(LinkFault::Over(gone.outcome())),
        };
        memory.resize(text.len() as u64);
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &text);
        let tag = u128::from_be_bytes(*digest.as_ref().first_chunk().expect("32 bytes"));
        let tag = HeaderValue::from_str(&format!("\"{tag:032x}\"")).expect("hex digits");
        let media_type = match text.first() {
            Some(b'{') => "application/feed+json",
            _ => "application/xml; charset=utf-8",
        };
        let mut fields = link_fields(&HeaderMap::new());
        fields.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
        fields.insert(header::ETAG, tag.clone());
        let is_known = request.if_none_match.as_ref() == Some(&tag);
        let (status, answer) = match is_known {
            true => {
                let status = StatusCode::NOT_MODIFIED;
                (status, answer::link_head(status, fields, None))
            }
            false => {
                let status = StatusCode::OK;
                let mut answer = answer::link_head(status, fields, Some(text.len() as u64));
                if !request.head_only {
                    answer.extend_from_slice(&text);
                }
                (status, answer)
            }
        };
        drop(text);
        Ok(self.send_whole(status, answer).await)
    }
}

/// Lists a copy under the address of its link, so that later requests find it: one that redirects led to and that others
/// share is not listed otherwise.
fn list_copy(prox: &Prox, client: HostKey, url: &str, copy: &Arc<PinnedCopy>) {
    let known = prox.retained.latest(client, url);
    let is_listed = known.is_some_and(|known| Arc::ptr_eq(&known, copy));
    if copy.head.status == StatusCode::OK && !is_listed {
        prox.retained.list(client, url, copy);
    }
}

/// Keeps a copy for later requests of its link, however this one ended.
fn keep_copy(prox: &Prox, client: HostKey, copy: Arc<PinnedCopy>) {
    copy.body.sweep(Arc::strong_count(&copy));
    let is_intact = !matches!(copy.body.extent().status, SpoolStatus::Failed(_));
    if copy.head.status == StatusCode::OK && is_intact && prox.is_client(&client) {
        let config = prox.config();
        let keep = config.feeds_keep;
        let renewed_every = RENEWED_EVERY.min(keep / 10);
        if !prox.retained.was_kept_within(client, &copy, renewed_every) {
            prox.retained
                .retain(client, copy, keep, config.client_kept_max);
        }
    } else {
        copy.on_reader_gone();
    }
}

/// Fetches a feed, all of it.
async fn fetch_feed(
    prox: &Arc<Prox>,
    request: &LinkRequest,
    link: &FeedLink,
    memory: &mut MemoryCharge,
) -> Result<Vec<u8>, ProxRefusal> {
    let host = || link.url.host_str().unwrap_or_default().to_owned();
    let unreadable = |cause: String| ProxRefusal::FeedUnreadable {
        host: host(),
        cause,
    };
    let too_large = || {
        unreadable(format!(
            "it is larger than {} MB",
            LINKED_FEED_BYTES_MAX >> 20
        ))
    };
    let fetch = request.fetch(&link.url, false);
    let copy = match prox.open(link.client, &fetch).await? {
        FetchedAnswer::Copy(opened) | FetchedAnswer::BareCopy { opened, .. } => opened.copy,
        FetchedAnswer::HeadOnly { head, .. } => {
            let status = head.status.as_u16();
            return Err(ProxRefusal::FeedMissing {
                host: host(),
                status,
            });
        }
    };
    if copy.head.status != StatusCode::OK {
        let status = copy.head.status.as_u16();
        return Err(ProxRefusal::FeedMissing {
            host: host(),
            status,
        });
    }
    if copy.head.headers.contains_key(header::CONTENT_ENCODING) {
        let cause = "it came in a coding that was not asked for";
        return Err(unreadable(cause.to_owned()));
    }
    let mut body = Vec::new();
    loop {
        let extent = copy.body.extent();
        let known = extent.total.unwrap_or(extent.have).max(extent.have);
        if known > LINKED_FEED_BYTES_MAX as u64 {
            return Err(too_large());
        }
        if !memory.try_resize(FEED_COPIES * known.max(READ_BYTES as u64)) {
            return Err(ProxRefusal::ClientMemoryFull);
        }
        let at = body.len() as u64;
        let read = std::future::poll_fn(|cx| copy.body.poll_read_at(cx, at, READ_BYTES)).await;
        match read {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) => body.extend_from_slice(&bytes),
            Err(SpoolReadError::Failed(cause)) => {
                return Err(ProxRefusal::BodyLost(cause.to_string()));
            }
            Err(SpoolReadError::Disk(error)) => {
                tracing::error!(%error, "the state directory cannot be read");
                return Err(ProxRefusal::StoreFailed);
            }
        }
    }
    copy.on_reader_gone();
    Ok(body)
}

/// Writes a feed anew, on a thread that reaches nothing else.
async fn rewrite(prox: &Arc<Prox>, link: &FeedLink, body: Vec<u8>) -> Result<Vec<u8>, ProxRefusal> {
    let _place = prox.link_state.rewriting.acquire().await;
    let (worker, link) = (prox.clone(), link.clone());
    let rewriting = tokio::task::spawn_blocking(move || {
        let (links, base) = worker.links().ok_or(ProxRefusal::LinkUnknown)?;
        let own = links.link(&base, &link.client, FeedLinkKind::Feed, &link.url);
        let own = own.ok_or(ProxRefusal::LinkUnknown)?;
        let rewritten = confined(|| {
            rewrite_feed(&body, &link.url, &own, |address| {
                let address = with_credentials(address, &link.url);
                links.link(&base, &link.client, FeedLinkKind::Episode, &address)
            })
        });
        rewritten.map_err(|error: FeedError| ProxRefusal::FeedUnreadable {
            host: link.url.host_str().unwrap_or_default().to_owned(),
            cause: error.to_string(),
        })
    });
    rewriting.await.expect("rewriting does not panic")
}

/// An enclosure's address with the password of its feed, if both are at one origin and it has none of its own.
fn with_credentials(address: &Url, feed: &Url) -> Url {
    let mut address = address.clone();
    let has_own = !address.username().is_empty() || address.password().is_some();
    if !has_own && address.origin() == feed.origin() {
        // Neither fails for an address of the web.
        let _ = address.set_username(feed.username());
        let _ = address.set_password(feed.password());
    }
    address
}
