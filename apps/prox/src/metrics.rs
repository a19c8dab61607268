//! The metrics of the proxy in the text format of OpenMetrics, which Prometheus reads.
//!
//! Labels are words of the program: their type admits no text that comes from a client, a server or the operator.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use d2tp_driver::{EngineCounts, Server};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::counters::{CacheResult, TrafficDirection, TrafficKind};
use crate::prox::Prox;

/// The media type of [`Prox::metrics`].
pub const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What all names of metrics begin with.
const PREFIX: &str = "cedos_prox";

/// A metric with its values.
#[derive(Debug)]
struct MetricFamily {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    is_counter: bool,
    samples: Vec<(Vec<(&'static str, &'static str)>, u64)>,
}

impl MetricFamily {
    fn gauge(name: &'static str, help: &'static str) -> MetricFamily {
        MetricFamily {
            name,
            help,
            unit: None,
            is_counter: false,
            samples: Vec::new(),
        }
    }

    fn counter(name: &'static str, help: &'static str) -> MetricFamily {
        MetricFamily {
            is_counter: true,
            ..MetricFamily::gauge(name, help)
        }
    }

    fn encode_value(&self, to: &mut MetricEncoder<'_>, value: u64) -> Result<(), fmt::Error> {
        match self.is_counter {
            true => to.encode_counter::<[(&str, &str); 0], u64, u64>(&value, None),
            false => to.encode_gauge(&i64::try_from(value).unwrap_or(i64::MAX)),
        }
    }

    /// Returns the family with the unit bytes.
    fn in_bytes(mut self) -> MetricFamily {
        self.unit = Some(Unit::Bytes);
        self
    }

    /// Returns the family with a single value, without labels.
    fn of(mut self, value: u64) -> MetricFamily {
        self.samples.push((Vec::new(), value));
        self
    }

    /// A value for each of these values of a label.
    fn by<'v>(
        mut self,
        label: &'static str,
        values: impl IntoIterator<Item = (&'v &'static str, &'v u64)>,
    ) -> MetricFamily {
        let samples = values.into_iter();
        (self.samples).extend(samples.map(|(word, value)| (vec![(label, *word)], *value)));
        self
    }
}

/// All metrics at one moment.
#[derive(Debug)]
struct MetricSnapshot(Vec<MetricFamily>);

impl Collector for MetricSnapshot {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        for family in &self.0 {
            let (kind, unit) = match family.is_counter {
                true => (MetricType::Counter, family.unit.as_ref()),
                false => (MetricType::Gauge, family.unit.as_ref()),
            };
            let mut metric = encoder.encode_descriptor(family.name, family.help, unit, kind)?;
            for (labels, value) in &family.samples {
                let labels = labels.as_slice();
                if labels.is_empty() {
                    family.encode_value(&mut metric, *value)?;
                } else {
                    family.encode_value(&mut metric.encode_family(&labels)?, *value)?;
                }
            }
        }
        Ok(())
    }
}

impl Prox {
    /// The metrics of this proxy as text of the type [`METRICS_TYPE`]; `server`: the D2TP server whose flows it serves.
    pub fn metrics(&self, server: Option<&Server>) -> String {
        let mut families = self.own_families();
        let workers = server.map_or(1, |server| server.counts_by_worker().len());
        families.push(
            MetricFamily::gauge(
                "memory_bound",
                "The most memory that the proxy takes, the kernel's buffers for its sockets included",
            )
            .in_bytes()
            .of(self.memory_bound(workers)),
        );
        if let Some(server) = server {
            families.extend(server_families(server));
        }
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(MetricSnapshot(families)));
        let mut out = String::new();
        text::encode(&mut out, &registry).expect("text can be written into a string");
        out
    }

    fn own_families(&self) -> Vec<MetricFamily> {
        let (counters, holdings) = (&*self.counters, self.holdings());
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let mut bytes = MetricFamily::counter("carried", "Bytes that flows and relays carried");
        for (direction, word) in [
            (TrafficDirection::Down, "down"),
            (TrafficDirection::Up, "up"),
        ] {
            for kind in TrafficKind::ALL {
                let labels = vec![("direction", word), ("kind", kind.as_str())];
                let count = &counters.bytes[direction as usize][kind as usize];
                bytes.samples.push((labels, load(count)));
            }
        }
        let hibernated = u64::from(self.ledger.hibernated_flows());
        let flows = u64::from(holdings.flows).saturating_sub(hibernated);
        let lookup = |lookup: CacheResult| load(&counters.lookups[lookup as usize]);
        let memory = &self.session_memory;
        vec![
            MetricFamily::gauge("flows", "Flows now")
                .by("state", [(&"awake", &flows), (&"hibernated", &hibernated)]),
            MetricFamily::gauge(
                "pinned",
                "Bytes of copies and uploads, those of the cache included",
            )
            .in_bytes()
            .by(
                "place",
                [
                    (&"memory", &holdings.memory_bytes),
                    (&"disk", &holdings.disk_bytes),
                ],
            ),
            MetricFamily::gauge(
                "kept",
                "Copies and uploads kept for devices that may return",
            )
            .by(
                "what",
                [
                    (&"copy", &(holdings.retained_copies as u64)),
                    (&"upload", &(holdings.retained_uploads as u64)),
                    (&"hibernated_copy", &(holdings.hibernated_copies as u64)),
                ],
            ),
            MetricFamily::gauge("cache", "Bytes of the cache that all clients share")
                .in_bytes()
                .of(holdings.cached_bytes),
            MetricFamily::gauge(
                "cache_responses",
                "Responses in the cache that all clients share",
            )
            .of(holdings.cached_responses as u64),
            MetricFamily::counter(
                "cache_lookups",
                "Requests for an object, by what answered them",
            )
            .by(
                "result",
                [
                    (&"hit", &lookup(CacheResult::Hit)),
                    (&"pinned", &lookup(CacheResult::Pinned)),
                    (&"miss", &lookup(CacheResult::Miss)),
                ],
            ),
            MetricFamily::counter(
                "cache_evictions",
                "Responses dropped to make room for others",
            )
            .of(self.cache.evictions()),
            MetricFamily::counter(
                "origin_requests",
                "Requests to origins, redirects and retries included",
            )
            .of(load(&counters.origin_requests)),
            MetricFamily::counter("origin_tunnels", "Connections to origins for tunnels")
                .of(load(&counters.origin_tunnels)),
            bytes.in_bytes(),
            MetricFamily::counter("flows_ended", "Flows that ended, by how")
                .by("outcome", &*counters.ended.lock()),
            MetricFamily::counter(
                "refusals",
                "Error answers, by the error type of Proxy-Status",
            )
            .by("error", &*counters.refused.lock()),
            MetricFamily::counter(
                "limited",
                "What was refused or ended by a limit, by that limit",
            )
            .by("limit", &*counters.limited.lock()),
            MetricFamily::counter(
                "relayed_packets_dropped",
                "Packets of relays that were beyond their client's limits",
            )
            .of(load(&counters.relayed_packets_dropped)),
            MetricFamily::counter(
                "tunnel_packets_dropped",
                "Packets of packet tunnels that were dropped, by the reason",
            )
            .by("reason", &*counters.tunnel_packets_dropped.lock()),
            MetricFamily::counter(
                "access_lines_lost",
                "Lines that the access log could not take",
            )
            .of(counters.access_lines_lost()),
            MetricFamily::gauge(
                "session_memory",
                "Bytes charged to clients for sessions and flows",
            )
            .in_bytes()
            .of(memory.used()),
            MetricFamily::gauge(
                "session_memory_max",
                "The most bytes that are charged to clients",
            )
            .in_bytes()
            .of(memory.max().unwrap_or(u64::MAX)),
            MetricFamily::counter(
                "session_memory_refusals",
                "Times that a client was refused memory and slowed down",
            )
            .of(memory.refusals()),
            MetricFamily::gauge(
                "socket_memory",
                "Bytes charged to clients for what the kernel may hold for their connections",
            )
            .in_bytes()
            .of(self.socket_memory.used()),
            MetricFamily::gauge("clients", "Clients that were enrolled")
                .of(self.clients.enrolled_count() as u64),
        ]
    }
}

fn server_families(server: &Server) -> Vec<MetricFamily> {
    let (awake, hibernated, half_open) = server.counts();
    let EngineCounts {
        turns,
        datagrams_in,
        bytes_in,
        datagrams_out,
        bytes_out,
    } = server.engine_counts();
    vec![
        MetricFamily::gauge("sessions", "D2TP sessions now").by(
            "state",
            [
                (&"awake", &(awake as u64)),
                (&"hibernated", &(hibernated as u64)),
                (&"half_open", &(half_open as u64)),
            ],
        ),
        MetricFamily::counter("engine_turns", "Times that the engine of D2TP ran").of(turns),
        MetricFamily::counter("datagrams", "UDP datagrams of sessions").by(
            "direction",
            [(&"in", &datagrams_in), (&"out", &datagrams_out)],
        ),
        MetricFamily::counter("datagram", "Bytes of UDP datagrams of sessions")
            .in_bytes()
            .by("direction", [(&"in", &bytes_in), (&"out", &bytes_out)]),
    ]
}
