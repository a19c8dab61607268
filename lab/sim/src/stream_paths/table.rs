//! All ends of streams, by number.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use cedos_lab_link::Time;
use d2tp_session::StreamPathId;

use super::half::{StreamEvent, StreamHalf, StreamRole};
use crate::tcp::ModelSegment;

/// An end of a stream, and where it is.
#[derive(Debug)]
pub(crate) struct StreamPlace {
    pub(crate) half: StreamHalf,
    pub(crate) role: StreamRole,
    /// The link over which the stream goes.
    pub(crate) link: usize,
    /// The device's address: its own, or for the proxy that behind its NAT.
    pub(crate) device: SocketAddr,
    /// The proxy's address, as the device reaches it.
    pub(crate) proxy: SocketAddr,
    /// The device's number of the order to open it.
    ticket: u64,
}

/// An event of a stream.
#[derive(Debug)]
pub(crate) struct StreamNews {
    pub(crate) stream: StreamPathId,
    pub(crate) link: usize,
    pub(crate) ticket: u64,
    pub(crate) event: StreamEvent,
}

/// All ends of streams.
#[derive(Debug, Default)]
pub(crate) struct SimStreams {
    next: u64,
    /// Whether the device's program does not run.
    pub(crate) device_is_away: bool,
    pub(crate) places: BTreeMap<StreamPathId, StreamPlace>,
}

impl SimStreams {
    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Adds an end.
    pub(crate) fn insert(
        &mut self,
        half: StreamHalf,
        link: usize,
        (device, proxy): (SocketAddr, SocketAddr),
        ticket: u64,
    ) {
        let stream = StreamPathId(self.next);
        self.next += 1;
        let place = StreamPlace {
            role: half.role(),
            half,
            link,
            device,
            proxy,
            ticket,
        };
        self.places.insert(stream, place);
    }

    /// The end of this role whose device has this address.
    pub(crate) fn find(&mut self, role: StreamRole, device: SocketAddr) -> Option<&mut StreamHalf> {
        let mut places = self.places.values_mut();
        let place = places.find(|place| place.role == role && place.device == device);
        place.map(|place| &mut place.half)
    }

    /// When an end has to run if nothing arrives.
    pub(crate) fn next_at(&self) -> Time {
        let ends = self.places.values();
        let due = ends.filter_map(|place| place.half.next_timeout(!self.device_is_away));
        due.min().unwrap_or(Time::NEVER)
    }

    /// Handles the timers of TCP.
    pub(crate) fn on_time(&mut self, now: Time) {
        for place in self.places.values_mut() {
            place.half.tcp.on_time(now);
        }
    }

    /// Lets the programs of the ends with this role read and write.
    pub(crate) fn run(&mut self, now: Time, role: StreamRole) -> Vec<StreamNews> {
        let mut news = Vec::new();
        for (stream, place) in &mut self.places {
            if place.role == role {
                let (link, ticket) = (place.link, place.ticket);
                let events = place.half.run(now).into_iter();
                news.extend(events.map(|event| StreamNews {
                    stream: *stream,
                    link,
                    ticket,
                    event,
                }));
            }
        }
        self.places.retain(|_, place| !place.half.is_gone());
        news
    }

    /// The bytes that the core may send in streams of this role, where that changed.
    pub(crate) fn take_rooms(&mut self, role: StreamRole) -> Vec<(StreamPathId, u64)> {
        let ends = self.places.iter_mut().filter(|(_, p)| p.role == role);
        ends.filter_map(|(stream, place)| Some((*stream, place.half.queue.take_room()?)))
            .collect()
    }

    /// Queues a packet for a stream; one that ended takes nothing.
    pub(crate) fn send(&mut self, stream: StreamPathId, packet: &[u8]) {
        if let Some(place) = self.places.get_mut(&stream) {
            place.half.queue.push(packet);
        }
    }

    /// Closes a stream when what waits is written.
    pub(crate) fn close(&mut self, stream: StreamPathId) {
        if let Some(place) = self.places.get_mut(&stream) {
            place.half.queue.close();
        }
    }

    /// Closes a stream at once.
    pub(crate) fn drop_now(&mut self, stream: StreamPathId) {
        if let Some(place) = self.places.get_mut(&stream) {
            place.half.close();
        }
    }

    /// Removes all ends of a role, because their machine has stopped.
    pub(crate) fn forget(&mut self, role: StreamRole) {
        self.places.retain(|_, place| place.role != role);
    }

    /// The next segment of an end, if it has one to send now.
    pub(crate) fn poll(&mut self, now: Time) -> Option<(StreamPathId, ModelSegment)> {
        let mut places = self.places.iter_mut();
        places.find_map(|(stream, place)| Some((*stream, place.half.tcp.poll(now)?)))
    }
}
