//! The servers' connections of tunnels whose sessions sleep.
//!
//! ```text
//!  no path to the device, and nothing under way in the tunnel ─▶ its flow may sleep
//!  the session sleeps ─▶ the connection stays here: what its server sends waits in the kernel, and then at the server
//!  the device is back ─▶ the flow is accepted again with the number of its connection, and copying goes on
//!  the record of the session expires, or the process ends ─▶ the connection is reset
//!
//!  another process takes over ─▶ every tunnel sleeps, with what is under way in it; connections and bytes are passed on
//!  the process crashes ─▶ a TunnelKeeper, if there is one, has the connections for the next process
//! ```
//!
//! A device that comes back to a process that was given nothing gets a reset.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use d2tp_driver::{FlowRemainder, HostKey, MemoryAccount, MemoryCharge, ResetCause};
use parking_lot::Mutex;
use socket2::SockRef;

use crate::charged_tcp::ChargedTcp;
use crate::tunnel_keeper::{KeptTunnelName, TunnelKeeper};
use crate::tunnel_pump::TunnelPump;

/// The tunnels that sleep, by the numbers in their memos.
#[derive(Debug, Default)]
pub(crate) struct SleepingTunnels {
    tunnels: Mutex<HashMap<u64, SleptTunnel>>,
    /// Who keeps the connections beside this process.
    keeper: OnceLock<Arc<dyn TunnelKeeper>>,
}

/// A tunnel that sleeps.
#[derive(Debug)]
pub(crate) struct SleptTunnel {
    pub(crate) client: HostKey,
    pub(crate) connection: ChargedTcp,
    pub(crate) remainder: TunnelRemainder,
    /// Charges `remainder`.
    pub(crate) memory: MemoryCharge,
}

impl SleptTunnel {
    /// A tunnel of a client, whose bytes are charged to this account.
    pub(crate) fn new(
        client: HostKey,
        connection: ChargedTcp,
        remainder: TunnelRemainder,
        account: &MemoryAccount,
    ) -> SleptTunnel {
        let mut memory = account.charge();
        memory.resize(remainder.bytes()); // They were charged as the flow's.
        SleptTunnel {
            client,
            connection,
            remainder,
            memory,
        }
    }
}

/// What was under way in a tunnel when it fell asleep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TunnelRemainder {
    /// Bytes of the device that the server has not taken. Whether none follow, and whether the server was told.
    pub(crate) up: Vec<u8>,
    pub(crate) is_up_ended: bool,
    pub(crate) is_up_shut: bool,
    /// Bytes of the server that the device has not acknowledged, and their offset in the flow; none if there was nothing under
    /// way. Whether none follow, and whether the device has acknowledged that.
    pub(crate) down: Vec<u8>,
    pub(crate) down_from: Option<u64>,
    pub(crate) is_down_ended: bool,
    pub(crate) is_down_shut: bool,
}

impl SleptTunnel {
    /// The name under which its connection is kept beside this process; none if something is under way in it.
    fn kept_name(&self, number: u64) -> Option<String> {
        KeptTunnelName::of(number, &self.client, &self.remainder)
    }
}

impl TunnelRemainder {
    /// What was under way in a flow and in both directions of its tunnel.
    pub(crate) fn of(flow: FlowRemainder, up: &TunnelPump, down: &TunnelPump) -> TunnelRemainder {
        TunnelRemainder {
            up: [up.held(), &flow.unread].concat(),
            is_up_ended: up.is_ended() || flow.is_read,
            is_up_shut: up.is_shut(),
            down: [&flow.unacked, down.held()].concat(),
            down_from: Some(flow.unacked_from),
            is_down_ended: down.is_ended(),
            is_down_shut: flow.is_sent,
        }
    }

    /// The number of bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.up.len() + self.down.len()) as u64
    }

    /// Drops what the device has: it reads on at this offset.
    ///
    /// # Errors
    /// The flow is over, or the device names bytes that are not here.
    pub(crate) fn begin_at(&mut self, offset: Option<u64>) -> Result<(), ResetCause> {
        let offset = offset.ok_or(ResetCause::TunnelReset)?;
        let Some(from) = self.down_from else {
            return Ok(());
        };
        let has = offset
            .checked_sub(from)
            .and_then(|has| usize::try_from(has).ok());
        match has.filter(|has| *has <= self.down.len()) {
            Some(has) => {
                self.down.drain(..has);
                self.down_from = Some(offset);
                Ok(())
            }
            None => Err(ResetCause::TunnelReset),
        }
    }

    /// The two directions that go on: from the device, and to it.
    pub(crate) fn pumps(&self) -> (TunnelPump, TunnelPump) {
        (
            TunnelPump::new(&self.up, self.is_up_ended, self.is_up_shut),
            TunnelPump::new(&self.down, self.is_down_ended, self.is_down_shut),
        )
    }
}

impl SleepingTunnels {
    /// Has the connections of tunnels kept beside this process from now on.
    pub(crate) fn keep_with(&self, keeper: Arc<dyn TunnelKeeper>) {
        let _ = self.keeper.set(keeper);
    }

    /// Keeps the tunnel of a client that sleeps. Its connection is reset if nobody comes for it. `is_kept`: also beside this
    /// process, if somebody does that.
    pub(crate) fn put(&self, number: u64, slept: SleptTunnel, is_kept: bool) {
        // The server must not take what it has for all there was.
        let _ = slept.connection.tcp().set_zero_linger();
        let keeper = self.keeper.get().filter(|_| is_kept);
        let copy = || slept.connection.tcp().as_fd().try_clone_to_owned().ok();
        if let Some((keeper, name)) = keeper.zip(slept.kept_name(number))
            && let Some(copy) = copy()
        {
            keeper.keep(name, copy);
        }
        self.tunnels.lock().insert(number, slept);
    }

    /// Has a connection kept no longer that goes on, or is over.
    fn forget(&self, number: u64, slept: &SleptTunnel) {
        if let Some((keeper, name)) = self.keeper.get().zip(slept.kept_name(number)) {
            keeper.forget(name);
        }
    }

    /// Takes the tunnel of a client that woke; none if it is another process's.
    pub(crate) fn take(&self, number: u64, client: HostKey) -> Option<SleptTunnel> {
        let mut tunnels = self.tunnels.lock();
        if tunnels.get(&number)?.client != client {
            return None;
        }
        let slept = tunnels.remove(&number)?;
        drop(tunnels);
        self.forget(number, &slept);
        let _ = SockRef::from(slept.connection.tcp()).set_linger(None);
        Some(slept)
    }

    /// Takes all, with their numbers.
    pub(crate) fn take_all(&self) -> Vec<(u64, SleptTunnel)> {
        self.tunnels.lock().drain().collect()
    }

    /// Resets the connection of a tunnel that will not wake any more.
    pub(crate) fn remove(&self, number: u64) {
        let removed = self.tunnels.lock().remove(&number);
        if let Some(slept) = &removed {
            self.forget(number, slept);
        }
        drop(removed); // Outside the lock: this closes it.
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_device_has_is_not_sent_again_and_what_nobody_has_is_an_error() {
        let slept = || TunnelRemainder {
            down: b"0123456789".to_vec(),
            down_from: Some(100),
            ..TunnelRemainder::default()
        };
        for (at, left) in [(100, "0123456789"), (104, "456789"), (110, "")] {
            let mut remainder = slept();
            remainder.begin_at(Some(at)).unwrap();
            assert_eq!(remainder.down, left.as_bytes());
        }
        for at in [Some(99), Some(111), None] {
            assert_eq!(slept().begin_at(at), Err(ResetCause::TunnelReset));
        }
        // Nothing was under way: the device may be anywhere.
        assert_eq!(TunnelRemainder::default().begin_at(Some(7)), Ok(()));
    }

    #[test]
    fn what_is_under_way_keeps_its_order() {
        let flow = FlowRemainder {
            unread: b"unread".to_vec(),
            is_read: true,
            unacked_from: 5,
            unacked: b"unacked".to_vec(),
            is_sent: false,
        };
        let up = TunnelPump::new(b"held up, ", false, false);
        let down = TunnelPump::new(b", held down", true, true);
        let remainder = TunnelRemainder::of(flow, &up, &down);
        assert_eq!(remainder.up, b"held up, unread");
        assert_eq!(remainder.down, b"unacked, held down");
        assert!(remainder.is_up_ended && !remainder.is_up_shut);
        // The end was written to the flow, and the device has not acknowledged it.
        assert!(remainder.is_down_ended && !remainder.is_down_shut);
    }
}
