//! Streams that the agent serves to players: their links last as long as the command that requested
//! them, and share the scheduler with transfers. While a stream runs, the agent scans for access
//! points every few seconds.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use d2tp_links::{CostClass, LOOK_STREAMING, Link, LinkKind, WifiRoamer};
use d2tp_time::{Span, Time};
use serde_json::json;
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{MissedTickBehavior, interval};

use super::api::ok_response;
use super::api_lines::{next_line, write_line};
use super::state::{Agent, lock};
use crate::fetch::boot_clock::BootInstant;
use crate::fetch::outcome::TransferFailure;
use crate::stream::stream_service::{StreamOrder, StreamService};

/// The interval at which a stream's state is reported.
const TELL_EVERY: Duration = Duration::from_secs(1);

impl Agent {
    /// Serves a stream order.
    pub(super) async fn stream(
        &self,
        ordered: &StreamOrder,
    ) -> Result<StreamService, TransferFailure> {
        let relative = [&ordered.store, &ordered.ca, &ordered.key];
        if let Some(path) = relative
            .into_iter()
            .flatten()
            .find(|path| path.is_relative())
        {
            let text = format!("{} does not begin at the root", path.display());
            return Err(TransferFailure::usage(text));
        }
        let scheduler = Some(self.scheduler.clone());
        StreamService::start(ordered, self.link_view.links(), scheduler, |_| ()).await
    }

    /// Reports the stream's state until the program disconnects.
    pub(super) async fn show_stream(
        self: &Arc<Agent>,
        serving: StreamService,
        write: &mut OwnedWriteHalf,
        lines: &mut BufReader<OwnedReadHalf>,
    ) -> io::Result<()> {
        let told = ok_response(json!({"links": serving.links, "told": serving.links_json()}));
        let shown = async {
            write_line(write, &told).await?;
            let mut every = interval(TELL_EVERY);
            every.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let counted = Mutex::new(BTreeMap::new());
            let agent = Arc::downgrade(self);
            serving.transport().with_traffic_callback(move |carried| {
                if let Some(agent) = agent.upgrade() {
                    agent.count_stream(carried, &mut lock(&counted));
                }
            });
            let mut scouting = std::pin::pin!(self.scout(&serving));
            loop {
                tokio::select! {
                    line = next_line(lines) => if line?.is_none() { return Ok(()) },
                    _ = every.tick() => {
                        serving.transport().report_traffic();
                        if self.is_ending() {
                            return Ok(());
                        }
                        write_line(write, &serving.state("progress")).await?;
                    }
                    () = &mut scouting => {}
                }
            }
        };
        let outcome: io::Result<()> = shown.await;
        let state = serving.stop().await;
        // Whoever asked may still listen, as when the agent ends.
        let _ = write_line(write, &state).await;
        outcome
    }

    /// Charges what links carried for the stream since the last call.
    fn count_stream(&self, carried: &BTreeMap<String, u64>, counted: &mut BTreeMap<String, u64>) {
        let links = self.link_view.links().borrow().clone();
        let mut more = Vec::new();
        for (device, bytes) in carried {
            let (device, bytes) = (device.clone(), *bytes);
            let before = counted.insert(device.clone(), bytes).unwrap_or(0);
            let link = links.iter().find(|link| link.name == device);
            let class = link.map_or(CostClass::Free, |link| link.class.class);
            let bytes = bytes.saturating_sub(before);
            if bytes > 0 {
                more.push((device, class, bytes));
            }
        }
        self.record_spending(&more);
        let mut meter = lock(&self.meter);
        for (_, class, bytes) in more {
            meter.carried(class, true, bytes);
        }
    }

    /// Scans for access points every few seconds, leaves those that carry nothing and joins better
    /// ones. Never returns.
    async fn scout(&self, serving: &StreamService) {
        let Some(manager) = self.link_view.manager() else {
            return std::future::pending().await;
        };
        let _turn = self.scan_lock.lock().await;
        let mut scout = WifiRoamer::new(manager);
        let mut every = interval(Duration::from(LOOK_STREAMING));
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let now = Time::ZERO + Span::from(BootInstant::now().since_boot());
            let links = serving
                .urls()
                .first()
                .map(|url| serving.transport().link_candidates(url));
            for device in wireless(&self.link_view.links().borrow().clone()) {
                let mut links = links.iter().flatten();
                if let Some(link) = links.find(|link| link.name == device && !link.stalled) {
                    // Its path answers; or, without a proxy, nothing was held against it.
                    scout.trials.answered(&device);
                    if let Some(rate) = link.rate_bytes_per_s {
                        scout.record_goodput(now, &device, rate);
                    }
                } else {
                    scout.trials.fell_silent(now, &device);
                }
                // It refuses when it has just looked by itself.
                let looked = scout.scan(&device).await;
                match scout.roam(now, &device).await {
                    Ok(roved) => {
                        for (device, point) in roved.blocked {
                            tracing::info!(device, point, "an access point that carries no data");
                        }
                        if let Some(point) = roved.joining {
                            tracing::info!(
                                device,
                                point = point.ssid,
                                "joining another access point"
                            );
                        }
                    }
                    Err(error) => tracing::debug!(device, %error, ?looked, "cannot join another \
                        access point"),
                }
            }
        }
    }
}

fn wireless(links: &[Link]) -> Vec<String> {
    let wireless = links.iter().filter(|link| link.kind == LinkKind::Wifi);
    wireless.map(|link| link.name.clone()).collect()
}
