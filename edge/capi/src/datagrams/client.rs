//! A socket that connects: its session, begun and ended.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::AsyncWriteExt as _;
use tokio::net::UdpSocket;
use tokio::sync::Notify;

use super::end::{begin, carry, read_all, say_last};
use super::socket::is_bound;
use super::{Far, Grams, LINE_WORD, LOOK, Mark, Place, take_name};
use crate::connect::{self, server_of};
use crate::errno::{Answer, Fault};
use crate::handed::{self, Handed};
use crate::home::Home;
use crate::options::Options;
use crate::pump::{self, Held};
use crate::table::{self, Fate};

/// Keeps what the program says while its session is not begun.
async fn collect(home: &Home, port: u16, name: Ipv4Addr, socket: &UdpSocket) {
    let mark = Mark {
        name,
        route: None,
        expiry: None,
    };
    loop {
        if socket.readable().await.is_ok() {
            let hear = |message: &[u8]| home.desk.put_early((port, name), mark, message);
            read_all(|buffer| socket.try_recv(buffer), hear);
        }
        tokio::task::yield_now().await;
    }
}

/// Where a datagram socket is to lead.
pub(crate) struct Call {
    pub(crate) grams: Arc<Grams>,
    pub(crate) of: connect::Call,
}

/// Begins a session for a program's socket; says by which name the program speaks to its far end.
pub(crate) fn connect(home: &Rc<Home>, call: Call) -> Answer<Ipv4Addr> {
    let (name, socket) = take_name(home, call.grams.port, call.grams.ports.plain)?;
    let key = (call.grams.port, name);
    home.desk.early.borrow_mut().insert(key, VecDeque::new());
    let look = Rc::new(Notify::new());
    let serial = call.of.fate.serial;
    let before = home
        .desk
        .clients
        .borrow_mut()
        .insert(call.grams.port, (serial, look.clone()));
    if let Some((_, before)) = before {
        // It was connected elsewhere: its far end there is over.
        before.notify_one();
    }
    tokio::task::spawn_local(call_out(home.clone(), call, name, socket, look));
    Ok(name)
}

async fn call_out(home: Rc<Home>, call: Call, name: Ipv4Addr, socket: UdpSocket, look: Rc<Notify>) {
    let (serial, port) = (call.of.fate.serial, call.grams.port);
    let is_wanted = || {
        let clients = home.desk.clients.borrow();
        clients.get(&port).is_some_and(|(now, _)| *now == serial) && is_bound(port)
    };
    let unwanted = || async {
        while is_wanted() {
            let _ = tokio::time::timeout(LOOK, look.notified()).await;
        }
    };
    let late = async {
        unwanted().await;
        // What it said before it closed waits for the session as long as it is worth.
        tokio::time::sleep(call.of.options.expiry).await;
    };
    let far = Far {
        grams: call.grams.clone(),
        name,
    };
    let opened = tokio::select! {
        made = make(&home, &call.of, &far) => made.map(Some),
        () = collect(&home, port, name, &socket) => Ok(None),
        () = late => Ok(None),
    };
    let (over, socket) = match opened {
        Ok(Some(Made::Here(held, context))) => {
            let held = pump::enter(&home, *held);
            // Before it is looked whether the program is still there: it may have spoken and gone.
            let over = match begin(&home, &held, &far, context) {
                Ok((end, inbox)) => tokio::select! {
                    over = carry(&home, &end, &inbox, &socket) => Some(over),
                    () = unwanted() => {
                        say_last(&end, Some(&socket)).await;
                        None
                    }
                },
                Err(fault) => Some(fault),
            };
            pump::leave(&home, &held);
            (over, socket.into_std())
        }
        Ok(Some(Made::There(handed))) => {
            let known = Rc::new(handed.twin());
            let place = Place::There(known.clone());
            home.desk
                .begin((port, name), &place, latest(&call.of).expiry);
            match socket.as_fd().try_clone_to_owned() {
                Ok(fd) => {
                    // From here on the agent reads, and nobody is woken here by what it has.
                    let socket = socket.into_std();
                    known.carry(port, fd);
                    let closed = async {
                        unwanted().await;
                        known.closed();
                        std::future::pending::<()>().await;
                    };
                    tokio::select! {
                        () = handed.follow(&home, &call.of.fate, None, Some(&far)) => {}
                        () = closed => {}
                    }
                    (call.of.fate.fault.get().cloned(), socket)
                }
                Err(error) => (Some(Fault::new(libc::EMFILE, error)), socket.into_std()),
            }
        }
        Ok(None) => (None, socket.into_std()),
        Err(fault) => (Some(fault), socket.into_std()),
    };
    home.desk.ends.borrow_mut().remove(&(port, name));
    home.desk.early.borrow_mut().remove(&(port, name));
    home.handed.borrow_mut().remove(&serial);
    call.grams.ends().remove(&name);
    if let Some(fault) = over {
        let _ = call.of.fate.fault.set(fault);
        // Whoever reads looks why.
        let _ = socket.and_then(|socket| socket.send(&[]));
    }
    call.of.fate.over.store(true, Ordering::Relaxed);
    let mut clients = home.desk.clients.borrow_mut();
    if clients.get(&port).is_some_and(|(now, _)| *now == serial) {
        clients.remove(&port);
    }
}

/// What the program asks for now.
fn latest(call: &connect::Call) -> Options {
    let known = table::change(call.cookie, |socket| socket.options.clone());
    known.unwrap_or_else(|| call.options.clone())
}

/// Who carries a socket's datagrams.
enum Made {
    Here(Box<Held>, u64),
    There(Handed),
}

async fn make(home: &Rc<Home>, call: &connect::Call, far: &Far) -> Result<Made, Fault> {
    let (server, through_proxy) = server_of(&call.to, &call.options)?;
    if through_proxy {
        return Err(no_proxy());
    }
    if let Some(handed) = handed::call(home, call, &server, None, Some(far)).await? {
        return Ok(Made::There(handed));
    }
    let way = connect::Way {
        server,
        target: None,
        key: None,
        owner: None,
    };
    let (held, context) = open(home, &way, || latest(call), call.fate.clone()).await?;
    Ok(Made::Here(Box::new(held), context))
}

/// Begins a session, and a flow in it that names the context of the datagrams, which is returned too.
pub(crate) async fn open(
    home: &Rc<Home>,
    way: &connect::Way,
    latest: impl Fn() -> Options,
    fate: Arc<Fate>,
) -> Result<(Held, u64), Fault> {
    let line = home.line(&way.server, way.key.as_deref()).await?;
    let options = latest();
    let flow = line.0.device.open(options.settings()?);
    let mut flow = flow.map_err(|error| Fault::new(libc::ENOBUFS, error))?;
    let context = line.0.next_context();
    let announced = flow
        .write_all(format!("{LINE_WORD} {context}\n").as_bytes())
        .await;
    announced.map_err(|error| Fault::new(libc::ECONNRESET, error))?;
    Ok((Held::new(flow, Some(line), fate, options), context))
}

/// Why a datagram socket leads nowhere without a server's key.
pub(crate) fn no_proxy() -> Fault {
    let why = "datagrams go to D2TP servers alone: give a key; the proxy carries streams";
    Fault::new(libc::EPROTONOSUPPORT, why)
}
