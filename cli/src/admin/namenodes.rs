//! `harvestfs admin namenode`: the members of the group of namenodes.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::bail;
use clap::Subcommand;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::group::{GroupMember, GroupRequest, GroupStatus};
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::transport::RpcError;

use super::DEADLINE;
use super::link::{AdminLink, unexpected};
use super::no_leader::NoLeader;

/// How long a namenode that is added may take until it has everything.
const ADDED_WITHIN: Duration = Duration::from_secs(3600);
/// How long the members may take to change.
const CHANGED_WITHIN: Duration = Duration::from_secs(90);
/// How long another one may take to lead.
const HANDED_OVER_WITHIN: Duration = Duration::from_secs(10);
/// How long there may be no leader before that is said.
pub const ELECTED_WITHIN: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(20);

/// What to do with the namenodes.
#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Show the namenodes: which one leads, and how far the others are.
    #[command(after_help = "Example:\n  \
        harvestfs admin namenode list")]
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take a namenode into the group: one that `init namenode` made and that runs, or one that lost its
    /// disk or was put back to a copy. It takes the place of the one that had its address before.
    #[command(after_help = "Example:\n  \
        harvestfs admin namenode add 10.0.0.7:9310")]
    Add {
        /// Where it listens.
        address: SocketAddr,
    },
    /// Have a namenode leave the group; not the one that leads.
    #[command(after_help = "Example:\n  \
        harvestfs admin namenode remove 10.0.0.3:9310")]
    Remove {
        /// Where it listens, or did.
        address: SocketAddr,
    },
    /// Hand leadership over, before the server of the one that leads is shut down, say.
    #[command(after_help = "Examples:\n  \
        harvestfs admin namenode transfer\n  \
        harvestfs admin namenode transfer 10.0.0.2:9310")]
    Transfer {
        /// The one that is to lead; the one that is least behind when left out.
        address: Option<SocketAddr>,
    },
}

/// Runs `harvestfs admin namenode`.
///
/// # Errors
/// When no namenode leads, or the change is refused.
pub async fn execute(link: &AdminLink, command: &GroupCommand) -> anyhow::Result<()> {
    match command {
        GroupCommand::List { json } => {
            let status = list(link).await?;
            let none = match status.leader {
                Some(_) => None,
                None => link.no_leader(None).await,
            };
            if *json {
                println!("{}", serde_json::to_string_pretty(&status)?);
            } else {
                print(&status, none.as_ref());
            }
            if status.leader.is_none() {
                bail!("none of the namenodes that answer leads");
            }
        }
        GroupCommand::Add { address } => {
            change(
                link,
                GroupRequest::Add(*address),
                ADDED_WITHIN,
                |before, now| {
                    let voter = |it: &GroupStatus| {
                        at(it, *address).filter(|it| it.is_voter).map(|it| it.id)
                    };
                    voter(now).is_some() && voter(now) != voter(before)
                },
            )
            .await?;
            println!("The namenode at {address} is a member.");
            advise(&list(link).await?);
            println!(
                "Datanodes and mounts that run hear of it. Name it in `namenodes` of each datanode.toml and \
                 client.toml for their next start."
            );
        }
        GroupCommand::Remove { address } => {
            change(
                link,
                GroupRequest::Remove(*address),
                CHANGED_WITHIN,
                |before, now| at(before, *address).is_some() && at(now, *address).is_none(),
            )
            .await?;
            println!("The namenode at {address} has left the group. Stop it.");
            advise(&list(link).await?);
        }
        GroupCommand::Transfer { address } => transfer(link, *address).await?,
    }
    Ok(())
}

/// The group as the leader sees it; as another one does, when there is none for a while.
async fn list(link: &AdminLink) -> anyhow::Result<GroupStatus> {
    let mut status = link.group(ELECTED_WITHIN).await?;
    status.members.sort_by_key(|it| it.addr);
    Ok(status)
}

/// Asks for a change of the members; again when the namenode that led went away, unless it is made by then.
async fn change(
    link: &AdminLink,
    request: GroupRequest,
    within: Duration,
    is_made: impl Fn(&GroupStatus, &GroupStatus) -> bool,
) -> anyhow::Result<()> {
    let before = list(link).await?;
    let began = tokio::time::Instant::now();
    loop {
        let asked = link.ask(AdminRequest::Group(request), within).await;
        let Err(error) = asked else {
            return Ok(());
        };
        let now = list(link).await?;
        // Even if the change was refused now, since the previous leader may have made it.
        if !now.is_changing && is_made(&before, &now) {
            return Ok(());
        }
        if !error.is::<RpcError>() {
            return Err(error);
        }
        if began.elapsed() >= within {
            return Err(error.context(
                "the namenode that leads went away meanwhile: see with `harvestfs admin namenode list` what came of \
                 it, and ask again",
            ));
        }
        eprintln!("The namenode that led went away meanwhile: asking the one that leads now.");
    }
}

fn at(status: &GroupStatus, address: SocketAddr) -> Option<&GroupMember> {
    status.members.iter().find(|it| it.addr == address)
}

async fn transfer(link: &AdminLink, to: Option<SocketAddr>) -> anyhow::Result<()> {
    let before = list(link).await?;
    let request = AdminRequest::Group(GroupRequest::Transfer(to));
    let asked = match link.ask(request, DEADLINE).await {
        Ok(AdminReply::Group(status)) => HandsOver {
            which: Which::Number(status.this),
            term: status.term,
        },
        Ok(_) => return Err(unexpected()),
        // It lost leadership before it sent its answer; the outcome is determined below.
        Err(error) if error.is::<RpcError>() => HandsOver {
            which: Which::At(link.connected_to()),
            term: before.term,
        },
        Err(error) => return Err(error),
    };
    let began = tokio::time::Instant::now();
    while began.elapsed() < HANDED_OVER_WITHIN {
        let now = list(link).await?;
        if let Some(leader) = asked.successor(&now) {
            if let Some(to) = to.filter(|to| *to != leader.addr) {
                bail!(
                    "the namenode at {to} did not take over, and the one at {} leads: see with `harvestfs admin \
                     namenode list` whether it answers and has everything, and try again",
                    leader.addr
                );
            }
            println!("The namenode at {} leads.", leader.addr);
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
    bail!(
        "no other namenode took over in {} s: see with `harvestfs admin namenode list` which of them answer, and try again",
        HANDED_OVER_WITHIN.as_secs()
    )
}

/// The namenode that was asked to hand leadership over.
struct HandsOver {
    which: Which,
    /// The term in which it led when it was asked, or the last that was known before.
    term: u64,
}

/// Which one it is: without its answer, only where it is is known.
enum Which {
    Number(u64),
    At(SocketAddr),
}

impl HandsOver {
    /// The other one that leads instead. The same one may lead again, in a later term.
    fn successor<'a>(&self, now: &'a GroupStatus) -> Option<&'a GroupMember> {
        let leader = leader(now)?;
        let is_other = match self.which {
            Which::Number(number) => leader.id != number,
            Which::At(addr) => leader.addr != addr,
        };
        (is_other && now.term > self.term).then_some(leader)
    }
}

fn leader(status: &GroupStatus) -> Option<&GroupMember> {
    status
        .members
        .iter()
        .find(|it| Some(it.id) == status.leader)
}

fn print(status: &GroupStatus, none: Option<&NoLeader>) {
    println!(
        "{:<24} {:<8} {:>10} {:>12}  NUMBER",
        "ADDRESS", "PART", "BEHIND", "LAST HEARD"
    );
    for member in &status.members {
        let leads = status.leader == Some(member.id);
        let part = match (leads, member.is_voter) {
            (true, _) => "leader",
            (false, true) => "standby",
            (false, false) => "learner",
        };
        let behind = match member.acknowledged {
            _ if leads => "-".to_owned(),
            Some(record) => status.last.saturating_sub(record).to_string(),
            None => "?".to_owned(),
        };
        let heard = match member.heard_ms {
            _ if leads => "-".to_owned(),
            Some(ms) => format!("{ms} ms ago"),
            None => "never".to_owned(),
        };
        println!(
            "{:<24} {part:<8} {behind:>10} {heard:>12}  {:x}",
            member.addr.to_string(),
            member.id
        );
    }
    println!("term {}, {}", status.term, count(status.last, "record"));
    if status.leader.is_none() {
        let this = status.members.iter().find(|it| it.id == status.this);
        let this = this.map_or_else(
            || format!("with the number {:x}, none of them,", status.this),
            |it| format!("at {}", it.addr),
        );
        println!("That is what the namenode {this} knows, which does not lead.");
        match none {
            Some(none) => {
                println!(
                    "{}.",
                    none.what()
                        .replacen("no namenode leads", "NO NAMENODE LEADS", 1)
                );
                println!("What to do: {}.", none.advice());
            }
            None => println!("NO NAMENODE LED a moment ago, and one does now: ask again."),
        }
    }
    if status.is_changing {
        println!("The members are being changed.");
    }
    advise(status);
}

/// What is not as it should be.
fn advise(status: &GroupStatus) {
    let voters = status.members.iter().filter(|it| it.is_voter).count();
    if let Some(what) = even_number(voters) {
        println!("{what}: add one, or remove one.");
    }
}

/// What is wrong with an even number of namenodes that vote.
pub fn even_number(voters: usize) -> Option<String> {
    if voters == 0 || !voters.is_multiple_of(2) {
        return None;
    }
    let survived = match (voters - 1) / 2 {
        0 => "no failure".to_owned(),
        survived => count(survived as u64, "failure"),
    };
    let less = voters - 1;
    let others = if less == 1 {
        "1 does"
    } else {
        &format!("{less} do")
    };
    Some(format!(
        "{voters} namenodes survive {survived}, as {others}"
    ))
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::group::Condition;

    use super::*;

    fn at_port(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    /// Of namenodes 1 to 3, which listen on the ports 1 to 3.
    fn led_by(leader: Option<u64>, term: u64) -> GroupStatus {
        let member = |id: u16| GroupMember {
            id: id.into(),
            name: "nn".to_owned(),
            addr: at_port(id),
            is_voter: true,
            acknowledged: None,
            heard_ms: None,
        };
        GroupStatus {
            this: leader.unwrap_or(1),
            condition: Condition::Member,
            leader,
            term,
            last: 1,
            last_term: term,
            members: (1..=3).map(member).collect(),
            is_changing: false,
        }
    }

    #[test]
    fn leadership_was_handed_over_when_another_one_leads_in_a_later_term() {
        for which in [Which::Number(2), Which::At(at_port(2))] {
            let asked = HandsOver { which, term: 7 };
            let successor = |leader, term| asked.successor(&led_by(leader, term)).map(|it| it.id);
            assert_eq!(successor(Some(3), 8), Some(3));
            assert_eq!(successor(None, 8), None, "nobody leads yet");
            assert_eq!(successor(Some(2), 7), None, "it still leads");
            assert_eq!(successor(Some(2), 9), None, "it leads again");
            assert_eq!(successor(Some(1), 6), None, "that was before");
        }
    }

    #[test]
    fn one_more_than_an_odd_number_survives_nothing_more() {
        for odd in [0, 1, 3, 5] {
            assert_eq!(even_number(odd), None);
        }
        for (voters, said) in [
            (2, "2 namenodes survive no failure, as 1 does"),
            (4, "4 namenodes survive 1 failure, as 3 do"),
            (6, "6 namenodes survive 2 failures, as 5 do"),
        ] {
            assert_eq!(even_number(voters).as_deref(), Some(said));
        }
    }
}
