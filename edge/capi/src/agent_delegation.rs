//! Delegates a connection to the user's agent, and follows its status there.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use d2tp_driver::ServerList;
use tokio::time::timeout;

use crate::agent_address::{self, ANSWER_WITHIN, no_agent, socket_path};
use crate::agent_connection::{AgentAbilities, AgentConnection, AgentEnd};
use crate::agent_message::{
    AgentCall, MessageFromAgent, MessageReader, MessageToAgent, ReopenClaim, VERSION, send_message,
};
use crate::connect_call::ConnectCall;
use crate::connection_status::ConnectionStatus;
use crate::connection_store::ConnectionStore;
use crate::datagrams::AgentDatagramPeer;
use crate::dlock;
use crate::engine_state::EngineState;
use crate::errno::SocketFault;
use crate::identity;
use crate::left_connection::{self, LeftConnection};
use crate::options::{PersistMode, SocketOptions};
use crate::pair;
use crate::program_stream::break_off;
use crate::reopen_token::ReopenToken;
use crate::table;

/// Asks an agent to make the connection, and returns when it is established; `None` if no agent
/// does. `far`: the peer of a datagram socket, whose descriptor is not passed yet.
///
/// # Errors
/// The agent's reason why the connection is not made.
pub(crate) async fn call(
    engine: &Rc<EngineState>,
    call: &ConnectCall,
    servers: &ServerList,
    target: Option<String>,
    far: Option<&AgentDatagramPeer>,
) -> Result<Option<AgentConnection>, SocketFault> {
    let Some(at) = socket_path() else {
        return Ok(None);
    };
    let Some(stream) = agent_address::connect(&at).await else {
        return Ok(None);
    };
    let asked = AgentCall {
        version: VERSION,
        server: servers.to_string(),
        target: target.clone(),
        key: identity::file()?,
        options: (&call.options).into(),
        keep: call.keep.clone(),
        datagrams: far.is_some(),
        resumes: None,
    };
    let key = asked.key.clone();
    let mut reader = MessageReader::new(stream.clone());
    let taken = async {
        let socket = MessageToAgent::Socket(Box::new(asked));
        send_message(&stream, &socket, None).await?;
        reader.next::<MessageFromAgent>().await
    };
    let taken = timeout(ANSWER_WITHIN, taken).await;
    let Some(abilities) = abilities_of(&taken) else {
        return Ok(None);
    };
    let mut handed = AgentConnection::begin(stream, abilities);
    // The engine's end and the memory, if the connection is to outlive the agent.
    let mut left = None;
    if far.is_none() {
        let Ok(end) = engine.port.detachable_end() else {
            return Ok(None);
        };
        // The next agent needs the descriptor of a connection that can be opened again.
        let program = call.keep.as_ref();
        let program = program.map(|_| pair::copy_program_socket(call.fd, call.cookie));
        let is_left = abilities.resumes && !left_connection::wait().is_zero();
        if is_left && !matches!(program, Some(Err(_))) {
            let kept = || -> std::io::Result<(OwnedFd, OwnedFd, OwnedFd)> {
                let store = ConnectionStore::create()?;
                Ok((end.try_clone()?.into(), store.try_clone()?, store))
            };
            // Without descriptors it ends with the agent.
            if let Ok((end, store, passed)) = kept() {
                if let Some(Ok(program)) = program {
                    handed.keep_program(program);
                }
                handed.store(passed);
                left = Some((end, store));
            }
        }
        handed.carry(call.from, end.into());
    }
    if dlock::is_held() {
        handed.send_dlock();
    }
    // From here on changed options are sent to the agent.
    let known = Rc::new(handed.share());
    engine
        .agent_connections
        .borrow_mut()
        .insert(call.conn_status.serial, known.clone());
    // Changes before that were not sent.
    let latest = table::change(call.cookie, |socket| socket.options.clone());
    if let Some(options) = latest.filter(|options| *options != call.options) {
        known.change(&options);
    }
    let claim = loop {
        match reader.next().await {
            Ok(Some(MessageFromAgent::Open { claim })) => break claim,
            Ok(Some(MessageFromAgent::Fault { errno, text })) => {
                engine
                    .agent_connections
                    .borrow_mut()
                    .remove(&call.conn_status.serial);
                return Err(SocketFault { errno, text });
            }
            Ok(Some(MessageFromAgent::Answer { ask, fault, info })) => known.hear(ask, fault, info),
            Ok(Some(MessageFromAgent::Room { bytes })) => {
                if let Some(far) = far {
                    far.has_room(bytes);
                }
            }
            Ok(Some(MessageFromAgent::Taken { .. } | MessageFromAgent::Reopened { .. })) => {}
            // The agent ended before there was anything to lose.
            Ok(Some(MessageFromAgent::Over { .. }) | None) | Err(_) => {
                engine
                    .agent_connections
                    .borrow_mut()
                    .remove(&call.conn_status.serial);
                return Ok(None);
            }
        }
    };
    handed.left = left.zip(claim).map(|((end, store), claim)| {
        Box::new(LeftConnection {
            end,
            from: call.from,
            store,
            claim,
            servers: servers.to_string(),
            target,
            key,
            keep: call.keep.clone(),
            cookie: call.cookie,
            options: call.options.clone(),
        })
    });
    handed.reader = Some(reader);
    Ok(Some(handed))
}

/// What the agent understands that answered like this, if it carries the connection.
fn abilities_of(
    taken: &Result<std::io::Result<Option<MessageFromAgent>>, tokio::time::error::Elapsed>,
) -> Option<AgentAbilities> {
    match taken {
        Ok(Ok(Some(MessageFromAgent::Taken {
            ok: true,
            version: VERSION,
            notices,
            locks,
            resumes,
        }))) => Some(AgentAbilities {
            notices: *notices,
            locks: *locks,
            resumes: *resumes,
        }),
        _ => None,
    }
}

/// A connection that was opened again at an agent.
pub(crate) struct ReopenedConnection {
    pub(crate) server: String,
    pub(crate) target: Option<String>,
    pub(crate) ipv6: bool,
    pub(crate) options: SocketOptions,
}

/// Opens a connection again that another process had.
///
/// # Errors
/// EOPNOTSUPP: no agent supports it. ENOENT, EBUSY, or the reason why the connection is over.
pub(crate) async fn reopen(
    engine: &Rc<EngineState>,
    token: ReopenToken,
    conn_status: &Arc<ConnectionStatus>,
) -> Result<ReopenedConnection, SocketFault> {
    let stream = match socket_path() {
        Some(at) => agent_address::connect(&at).await,
        None => None,
    };
    let stream = stream.ok_or_else(no_agent)?;
    let mut reader = MessageReader::new(stream.clone());
    let asked = async {
        send_message(
            &stream,
            &MessageToAgent::Reopen(ReopenClaim::to(token)),
            None,
        )
        .await?;
        match reader.next().await? {
            Some(MessageFromAgent::Taken {
                ok: true,
                version: VERSION,
                notices,
                locks,
                ..
            }) => {
                let abilities = AgentAbilities {
                    notices,
                    locks,
                    resumes: false,
                };
                std::io::Result::Ok((reader.next().await?, abilities))
            }
            _ => Ok((None, AgentAbilities::default())),
        }
    };
    let (reopened, hears) = match timeout(ANSWER_WITHIN, asked).await {
        Ok(Ok((
            Some(MessageFromAgent::Reopened {
                server,
                target,
                ipv6,
                options,
            }),
            hears,
        ))) => {
            let options = SocketOptions {
                persist: PersistMode::Open,
                ..SocketOptions::try_from(&options)?
            };
            let reopened = ReopenedConnection {
                server,
                target,
                ipv6,
                options,
            };
            (reopened, hears)
        }
        Ok(Ok((Some(MessageFromAgent::Fault { errno, text }), _))) => {
            return Err(SocketFault { errno, text });
        }
        _ => return Err(no_agent()),
    };
    let mut handed = AgentConnection::begin(stream, hears);
    handed.reader = Some(reader);
    if dlock::is_held() {
        handed.send_dlock();
    }
    let known = Rc::new(handed.share());
    engine
        .agent_connections
        .borrow_mut()
        .insert(conn_status.serial, known);
    let (engine, conn_status) = (engine.clone(), conn_status.clone());
    tokio::task::spawn_local(
        async move { follow(handed, &engine, &conn_status, None, None).await },
    );
    Ok(reopened)
}

/// Follows the status of a connection until it is over. `from`: the port of the program's socket, which
/// may not be connected yet. `far`: the peer of a datagram socket.
pub(crate) async fn follow(
    mut handed: AgentConnection,
    engine: &EngineState,
    conn_status: &Arc<ConnectionStatus>,
    from: Option<u16>,
    far: Option<&AgentDatagramPeer>,
) {
    let mut end = handed.hear_until_over(conn_status, far).await;
    while end == AgentEnd::Lost
        && conn_status.fault.get().is_none()
        && let Some(left) = handed.left.take()
    {
        end = match left.resume(&mut handed).await {
            Ok(()) => {
                handed.left = Some(left);
                handed.hear_until_over(conn_status, far).await
            }
            Err(fault) => {
                let _ = conn_status.fault.set(fault);
                AgentEnd::Lost
            }
        };
    }
    if end == AgentEnd::Lost {
        let text = "the agent that carried this connection is gone";
        let fault = SocketFault::new(libc::ECONNRESET, text);
        let _ = conn_status.fault.set(fault);
    }
    conn_status.over.store(true, Ordering::Relaxed);
    engine
        .agent_connections
        .borrow_mut()
        .remove(&conn_status.serial);
    handed.drop_pending();
    // The kernel resets sockets that were connected, with the last copy of their ends. One that was not is still waiting.
    handed.left.take();
    if end == AgentEnd::Lost
        && let Some(from) = from
        && let Ok(stream) = engine.port.connect_waiting(from).await
    {
        break_off(stream);
    }
}
