//! The device's streams: sockets of its links that lead through TCP.

use cedos_lab_link::Time;
use d2tp_device::AttachedSocket;
use d2tp_session::{LinkId, StreamPathId};

use crate::device::SimDevice;
use crate::log::Log;
use crate::network::{Delivery, SimNetwork};
use crate::stream_paths::{StreamEvent, StreamNews};

impl SimDevice {
    /// The socket that a stream is, while it is one.
    pub(crate) fn socket_of(&self, stream: StreamPathId) -> Option<LinkId> {
        let found = self.streams.iter().find(|(_, known)| **known == stream);
        found.map(|(socket, _)| *socket)
    }

    /// Handles an event of a stream. Returns packets that arrived in it.
    pub(crate) fn on_stream(
        &mut self,
        now: Time,
        news: StreamNews,
        log: &mut Log,
    ) -> Vec<Delivery> {
        let (stream, link, ticket) = (news.stream, news.link, news.ticket);
        let core_now = self.host.clock.core(now);
        let name = self.names[link].clone();
        let made = match news.event {
            StreamEvent::Packets(packets) => {
                let delivery = |bytes| Delivery::in_stream(link, stream, bytes);
                return packets.into_iter().map(delivery).collect();
            }
            StreamEvent::Ended => {
                log.note(now, "device", || format!("stream {} ends", stream.0));
                self.look_at = now;
                self.host.endpoint.on_stream_closed(core_now, stream);
                if let Some(socket) = self.socket_of(stream) {
                    self.streams.remove(&socket);
                    self.with_links(now, |links, now, session| {
                        links.on_stream_closed(now, session, socket);
                    });
                }
                return Vec::new();
            }
            StreamEvent::Opened => {
                let socket = self.socket_number(link);
                self.streams.insert(socket, stream);
                Ok(AttachedSocket {
                    socket,
                    remote: stream.address(),
                })
            }
            StreamEvent::Failed(failure) => Err(failure),
        };
        log.note(now, "device", || {
            format!("stream {} on {name}: {made:?}", stream.0)
        });
        self.look_at = now;
        self.links.on_stream(core_now, &name, ticket, made);
        Vec::new()
    }

    /// Closes the streams whose paths are closed.
    pub(crate) fn close_streams(&mut self, network: &mut SimNetwork) {
        if self.closing.is_empty() {
            return;
        }
        let closing = std::mem::take(&mut self.closing);
        let has_path = |socket: &LinkId| self.core().is_some_and(|s| s.has_path(*socket));
        let (open, done): (Vec<LinkId>, Vec<LinkId>) = closing.into_iter().partition(has_path);
        self.closing = open;
        for socket in done {
            if let Some(stream) = self.streams.remove(&socket) {
                network.streams.close(stream);
            }
        }
    }
}
