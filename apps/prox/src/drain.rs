//! A node that is to be left: its devices are asked to go on at another one, and the node ends when they have.
//!
//! ```text
//!  cedos prox drain ─▶ each second: sessions whose flows another node can take up now are asked to move
//!                                   sessions that another node owns end here
//!                  ─▶ none is left, or the time is over ─▶ the rest is asked; the node stops as by SIGTERM
//! ```
//!
//! A session is not asked while it has a tunnel, an upload, or a copy that is being fetched: the other node would lose
//! it, or ask the origin for bytes that are already here. The same holds for a device that found a nearer node and asks.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use d2tp_driver::{MOVE_AGAIN_AFTER, MoveReport, Server};
use tokio::time::{Instant, sleep};

use crate::drain_state::DrainOrder;
use crate::flow_memo::FlowMemo;
use crate::prox::Prox;

/// The interval between looks at which sessions have moved. Higher: the node ends later.
const LOOK_EVERY: Duration = Duration::from_millis(200); // a guess: a lookup in the store for each session
/// How long the last requests to move may take to leave.
const LAST_REQUESTS_WITHIN: Duration = Duration::from_millis(20); // as of the last packets of a server that ends

impl Prox {
    /// Begins to let the devices go on elsewhere. A later order replaces an earlier one.
    pub(crate) fn begin_drain(&self, order: DrainOrder) {
        *self.drain.order.lock() = Some(order);
        self.drain.ordered.notify_one();
    }

    /// The sessions that are left, if devices are asked to go on elsewhere.
    pub fn drain_progress(&self) -> Option<MoveReport> {
        *self.drain.progress.lock()
    }

    /// Waits for an order to let devices go on elsewhere, and returns when none is left, or the time is over.
    pub async fn drained(self: Arc<Self>, server: Arc<Server>) {
        self.drain.ordered.notified().await;
        let begun = Instant::now();
        let mut asked_at: Option<Instant> = None;
        loop {
            let Some(order) = *self.drain.order.lock() else {
                return;
            };
            if begun.elapsed() >= order.within {
                break self.ask_the_rest(&server, order).await;
            }
            if asked_at.is_none_or(|at| at.elapsed() >= MOVE_AGAIN_AFTER) {
                asked_at = Some(Instant::now());
                let left = server.ask_to_move(order.to, false, &|memos| self.are_whole(memos));
                // Without a shared store nothing tells that a device has gone; without a flow it loses nothing.
                let is_awaited =
                    self.shared_records().is_some() || begun.elapsed() < MOVE_AGAIN_AFTER;
                *self.drain.progress.lock() = Some(left);
                if left.staying == 0 && (left.asked == 0 || !is_awaited) {
                    break;
                }
            }
            sleep(LOOK_EVERY).await;
            server.release_moved().await;
            if self.shared_records().is_some() && server.counts().0 == 0 {
                break;
            }
        }
        tracing::info!(
            lasted_ms = begun.elapsed().as_millis() as u64,
            "the devices were asked to go on at another node; this one ends"
        );
    }

    /// Lets devices that found a nearer node go on there, without end. It does nothing without a shared store.
    pub async fn answer_move_questions(self: Arc<Self>, server: Arc<Server>) {
        server
            .answer_move_questions(&|memos| self.are_whole(memos))
            .await;
    }

    async fn ask_the_rest(&self, server: &Server, order: DrainOrder) {
        let left = server.ask_to_move(order.to, true, &|_| true);
        tracing::warn!(
            sessions = left.asked,
            "the time for devices to go on elsewhere is over"
        );
        sleep(LAST_REQUESTS_WITHIN).await;
    }

    /// Whether the copies of these flows are complete, so that another node asks the origin for nothing.
    fn are_whole(&self, memos: &[Bytes]) -> bool {
        let mut memos = memos.iter().map(|memo| FlowMemo::decode(memo));
        memos.all(|memo| match memo {
            Some(FlowMemo {
                tunnel: Some(_), ..
            }) => false,
            Some(FlowMemo { copy: None, .. }) => true,
            Some(FlowMemo { copy: Some(id), .. }) => self.is_whole_for_others(id),
            None => false,
        })
    }
}
