//! A socket that is bound: a server, and an end for each device.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::{
    Admission, DriverError, EndpointConfig, Flow, FlowIo as _, Server, ServerOptions,
};
use tokio::io::AsyncReadExt as _;
use tokio::sync::{Notify, Semaphore};

use super::end::{begin, carry, finish};
use super::socket::is_bound;
use super::{Far, Grams, LINE_WORD, LOOK, take_name};
use crate::errno::{Answer, Errno};
use crate::home::Home;
use crate::options::Options;
use crate::pair;
use crate::pump::{self, Held};
use crate::table::Fate;

/// Far ends of one bound socket; each has a kernel socket. Further devices are refused.
const ENDS_MAX: usize = 4096; // a guess: a quarter of the descriptors that the system gives a process
/// A flow that has not named its context after so long is nobody's.
const LINE_WAIT: Duration = Duration::from_secs(10); // a guess
/// Bytes of that line.
const LINE_BYTES_MAX: usize = 32;
/// Reset code of a flow that is not of a datagram socket, or one too many.
const NOT_HERE: u64 = 0xd302;

/// A bound socket.
pub(super) struct Hall {
    pub(super) port: u16,
    at: SocketAddr,
    pub(super) options: RefCell<Options>,
    ends: Cell<usize>,
    /// It is to be looked whether the program still has it.
    pub(super) look: Notify,
    server: RefCell<Option<Rc<Server>>>,
    /// Closed when the address is free again.
    pub(super) gone: Semaphore,
}

/// Makes a program's socket a server at `address`; says which that is.
pub(crate) async fn bind(
    home: &Rc<Home>,
    grams: &Arc<Grams>,
    address: SocketAddr,
    options: Options,
) -> Answer<SocketAddr> {
    let key = home.key().map_err(|fault| Errno(fault.errno))?;
    let bound = Server::bind(ServerOptions {
        listen: address,
        key,
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    });
    let server = bound.map_err(|error| match error {
        DriverError::Bind(error) => error.cause.into(),
        _ => Errno(libc::EADDRINUSE),
    })?;
    let server = Rc::new(server);
    let at = server.local_addr();
    let hall = Rc::new(Hall {
        port: grams.port,
        at,
        options: RefCell::new(options),
        ends: Cell::new(0),
        look: Notify::new(),
        server: RefCell::new(Some(server.clone())),
        gone: Semaphore::new(0),
    });
    home.desk.halls.borrow_mut().push(hall.clone());
    tokio::task::spawn_local(serve(home.clone(), hall, grams.clone(), server));
    Ok(at)
}

async fn serve(home: Rc<Home>, hall: Rc<Hall>, grams: Arc<Grams>, server: Rc<Server>) {
    let unwanted = async {
        loop {
            let _ = tokio::time::timeout(LOOK, hall.look.notified()).await;
            if !is_bound(hall.port) {
                return;
            }
        }
    };
    let mut unwanted = pin!(unwanted);
    loop {
        let flow = tokio::select! {
            flow = server.accept() => flow,
            () = &mut unwanted => None,
        };
        match flow {
            Some(flow) => {
                let answered = answer(home.clone(), hall.clone(), grams.clone(), flow);
                tokio::task::spawn_local(answered);
            }
            None => break,
        }
    }
    hall.server.take();
    server.close().await;
    drop(server);
    pair::until_free(hall.at).await;
    let all = &home.desk.halls;
    all.borrow_mut().retain(|other| !Rc::ptr_eq(other, &hall));
    hall.gone.close();
}

/// A device's end.
async fn answer(home: Rc<Home>, hall: Rc<Hall>, grams: Arc<Grams>, mut flow: Flow) {
    hall.ends.set(hall.ends.get() + 1);
    let named = tokio::time::timeout(LINE_WAIT, context_of(&mut flow)).await;
    let taken = match named {
        Ok(Some(context)) if hall.ends.get() <= ENDS_MAX => {
            let taken = take_name(&home, grams.port, grams.ports.plain);
            taken.ok().map(|taken| (context, taken))
        }
        _ => None,
    };
    match taken {
        Some((context, (name, socket))) => {
            let held = Held::new(flow, None, Fate::new(), hall.options.borrow().clone());
            let held = pump::enter(&home, held);
            // Why it is over the program is not told: others go on.
            let far = Far {
                grams: grams.clone(),
                name,
            };
            if let Ok((end, inbox)) = begin(&home, &held, &far, context) {
                carry(&home, &end, &inbox, &socket).await;
            }
            finish(&held);
            home.desk.ends.borrow_mut().remove(&(grams.port, name));
            grams.ends().remove(&name);
            pump::leave(&home, &held);
        }
        None => flow.reset(NOT_HERE),
    }
    hall.ends.set(hall.ends.get() - 1);
}

/// What a flow of a datagram socket says first.
async fn context_of(flow: &mut Flow) -> Option<u64> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        if line.len() == LINE_BYTES_MAX {
            return None;
        }
        line.push(flow.read_u8().await.ok()?);
    }
    context_in(&line)
}

fn context_in(line: &[u8]) -> Option<u64> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let context = line.strip_prefix(LINE_WORD)?.strip_prefix(' ')?;
    let context = context.parse().ok()?;
    (context > 0 && context < d2tp_driver::CONTEXTS_OF_COPIES).then_some(context)
}

pub(super) fn hall_at(home: &Home, port: u16) -> Option<Rc<Hall>> {
    let halls = home.desk.halls.borrow();
    halls.iter().find(|hall| hall.port == port).cloned()
}

/// A bound socket is to be connected: it is no server any more.
pub(crate) async fn unbind(home: &Rc<Home>, port: u16) {
    if let Some(hall) = hall_at(home, port) {
        let server = hall.server.take();
        if let Some(server) = server {
            server.close().await;
        }
        let _ = hall.gone.acquire().await;
    }
}

/// Tells every device that this process leaves; says whether there was a server.
pub(crate) fn say_goodbye(home: &Home) -> bool {
    let halls = home.desk.halls.borrow();
    for hall in halls.iter() {
        if let Some(server) = &*hall.server.borrow() {
            server.say_goodbye();
        }
    }
    !halls.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flows_first_line_names_a_context_or_nothing() {
        assert_eq!(context_in(b"DATAGRAMS 7\n"), Some(7));
        for line in [
            &b"DATAGRAMS 7"[..],
            b"DATAGRAMS 0\n",
            b"DATAGRAMS 4294967296\n",
            b"DATAGRAMS x\n",
            b"GET / HTTP/1.1\n",
            b"\xff\n",
        ] {
            assert_eq!(context_in(line), None, "{line:?}");
        }
    }
}
