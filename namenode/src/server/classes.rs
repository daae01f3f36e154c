//! The utilisation classes with current CPU use, as requested by schedulers.

use std::num::NonZeroU32;

use harvestfs_cycles::job::JobType;
use harvestfs_cycles::select::{ClassHistory, ClassId, Headrooms, Server};
use harvestfs_protocol::classes::{
    CLASSES_VERSION, ClassedServer, Classes, Headroom, UtilisationClass,
};
use harvestfs_protocol::history::TenantPattern;
use harvestfs_protocol::node::PrimaryLoad;
use harvestfs_telemetry::analysis::Analysis;
use harvestfs_telemetry::profile::TenantKey;

use super::history::{pattern, permille, tenant_name};

/// A server that is alive.
pub(super) struct LiveServer {
    pub name: String,
    pub tenant: TenantKey,
    /// What its primary tenant uses, if the datanode reports it.
    pub primary: Option<PrimaryLoad>,
}

/// Builds the classes of an analysis with these servers, which are sorted by name.
pub(super) fn classes(analysis: Option<&Analysis>, servers: Vec<LiveServer>) -> Classes {
    let found = analysis.map_or(&[][..], |analysis| &analysis.classes);
    let mut classes: Vec<UtilisationClass> = (0..)
        .zip(found)
        .map(|(number, class)| UtilisationClass {
            class: number,
            pattern: pattern(class.pattern),
            average_cpu_permille: permille(class.average_cpu_share),
            peak_cpu_permille: permille(class.peak_cpu_share),
            tenants: Vec::new(),
            servers: Vec::new(),
            cpu_permille: None,
            headroom: None,
        })
        .collect();
    let tenants = analysis
        .into_iter()
        .flat_map(|analysis| &analysis.tenants)
        .filter_map(|(key, tenant)| Some((key, tenant.class?)));
    for (key, class) in tenants {
        classes[class].tenants.push(tenant_name(key));
    }
    let mut without_class = Vec::new();
    for LiveServer {
        name,
        tenant,
        primary,
    } in servers
    {
        let class = analysis.and_then(|analysis| analysis.tenants.get(&tenant)?.class);
        let list = match class {
            Some(class) => &mut classes[class].servers,
            None => &mut without_class,
        };
        let size = primary.and_then(|primary| primary.size);
        list.push(ClassedServer {
            name,
            cpu_permille: primary.map(|primary| primary.cpu_permille),
            memory_permille: primary.and_then(|primary| primary.memory_permille),
            cores: size.map(|size| size.cores),
            memory_mib: size.map(|size| size.memory_mib),
        });
    }
    let histories = found.iter().map(|class| ClassHistory {
        pattern: class.pattern,
        average_cpu_share: class.average_cpu_share.clamp(0.0, 1.0),
        peak_cpu_share: class.peak_cpu_share.clamp(0.0, 1.0),
    });
    add_headroom(&mut classes, &histories.collect::<Vec<_>>());
    Classes {
        version: CLASSES_VERSION,
        analysed_unix_s: analysis.map(|analysis| analysis.at_s.into()),
        classes,
        without_class,
    }
}

/// Computes the headroom of each class. A server that does not report its cores counts as having one.
fn add_headroom(classes: &mut [UtilisationClass], histories: &[ClassHistory]) {
    if classes.is_empty() {
        return;
    }
    let used: Vec<(Server, u16)> = classes
        .iter()
        .flat_map(|class| {
            let of_class = class.servers.iter();
            of_class.filter_map(|it| {
                let server = Server {
                    class: ClassId(class.class),
                    cores: it
                        .cores
                        .and_then(NonZeroU32::new)
                        .unwrap_or(NonZeroU32::MIN),
                };
                Some((server, it.cpu_permille?))
            })
        })
        .collect();
    let servers: Vec<Server> = used.iter().map(|it| it.0).collect();
    let mut headrooms = match Headrooms::new(histories, &servers, 0.0) {
        Ok(headrooms) => headrooms,
        Err(error) => unreachable!("classes and their servers make a cluster: {error}"),
    };
    for (place, &(server, permille)) in used.iter().enumerate() {
        let millicores = u32::from(permille).saturating_mul(server.cores.get());
        headrooms.uses(place, millicores);
    }
    for class in classes {
        let id = ClassId(class.class);
        let (count, sum) = (
            sampled(class).count(),
            sampled(class).map(u64::from).sum::<u64>(),
        );
        if count == 0 {
            continue;
        }
        let headroom = |job_type| permille(headrooms.headroom(job_type, id));
        class.cpu_permille = Some(permille(sum as f64 / count as f64 / 1_000.0));
        class.headroom = Some(Headroom {
            short_permille: headroom(JobType::Short),
            medium_permille: headroom(JobType::Medium),
            long_permille: headroom(JobType::Long),
        });
    }
}

/// All classes of one pattern, combined.
pub(super) struct OfPattern {
    pub classes: usize,
    pub servers: usize,
    /// Mean share over the servers that report CPU use; NaN if none does.
    pub cpu: f64,
    pub headroom_short: f64,
    pub headroom_medium: f64,
    pub headroom_long: f64,
}

/// Combines the classes of a pattern.
pub(super) fn of_pattern(classes: &Classes, pattern: TenantPattern) -> OfPattern {
    let found = || {
        let classes = classes.classes.iter();
        classes.filter(move |class| class.pattern == pattern)
    };
    let mean = |permille: fn(&UtilisationClass) -> Option<u16>| {
        let (mut sum, mut count) = (0.0, 0.0);
        for class in found() {
            if let Some(permille) = permille(class) {
                let servers = sampled(class).count() as f64;
                sum += servers * f64::from(permille) / 1_000.0;
                count += servers;
            }
        }
        // NaN if nothing is known.
        sum / count
    };
    OfPattern {
        classes: found().count(),
        servers: found().map(|class| class.servers.len()).sum(),
        cpu: mean(|class| class.cpu_permille),
        headroom_short: mean(|class| Some(class.headroom?.short_permille)),
        headroom_medium: mean(|class| Some(class.headroom?.medium_permille)),
        headroom_long: mean(|class| Some(class.headroom?.long_permille)),
    }
}

/// The CPU use of those servers of a class that report it.
fn sampled(class: &UtilisationClass) -> impl Iterator<Item = u16> {
    class
        .servers
        .iter()
        .filter_map(|server| server.cpu_permille)
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::node::ServerSize;
    use harvestfs_telemetry::analysis::TenantAnalysis;
    use harvestfs_telemetry::classes::Class;
    use harvestfs_telemetry::coincidence::Coincidence;
    use harvestfs_telemetry::hours::WeekHours;
    use harvestfs_telemetry::profile::{Pattern, TenantProfile};

    use super::*;

    const NOW_S: u32 = 20_500 * 86_400;

    fn key(function: &str) -> TenantKey {
        TenantKey {
            environment: "e".to_owned(),
            machine_function: function.to_owned(),
        }
    }

    fn server(name: &str, function: &str, cpu_permille: Option<u16>) -> LiveServer {
        LiveServer {
            name: name.to_owned(),
            tenant: key(function),
            primary: cpu_permille.map(|cpu_permille| PrimaryLoad {
                cpu_permille,
                memory_permille: Some(cpu_permille / 2),
                size: Some(ServerSize {
                    cores: 12,
                    memory_mib: 1_024,
                }),
                ..PrimaryLoad::default()
            }),
        }
    }

    /// Two classes of one tenant each, and a tenant of which nothing is known.
    fn analysis() -> Analysis {
        let class = |average, peak, member| Class {
            pattern: Pattern::Constant,
            average_cpu_share: average,
            peak_cpu_share: peak,
            members: vec![member],
        };
        let tenant = |class: Option<usize>| TenantAnalysis {
            profile: TenantProfile {
                reimages_per_server_month: 0.0,
                peak_cpu_share: 0.0,
                average_cpu_share: 0.0,
                busy_share: 0.0,
                busy_hours: WeekHours::default(),
                pattern: Pattern::Constant,
            },
            pattern_known: class.is_some(),
            class,
            servers: 1,
            reimages: 0,
            server_months: 1.0,
            coverage: 1.0,
        };
        let tenants = [("calm", Some(0)), ("lively", Some(1)), ("new", None)];
        Analysis {
            at_s: NOW_S,
            tenants: tenants
                .map(|(function, class)| (key(function), tenant(class)))
                .into(),
            classes: vec![class(0.2, 0.4, 0), class(0.5, 0.8, 1)],
            pairs: Vec::new(),
            coincidence: Coincidence::default(),
        }
    }

    #[test]
    fn each_server_is_in_the_class_of_its_tenant() {
        let servers = vec![
            server("s1", "calm", Some(100)),
            server("s2", "calm", Some(500)),
            server("s3", "lively", None),
            server("s4", "new", Some(900)),
            server("s5", "never heard of", None),
        ];
        let found = classes(Some(&analysis()), servers);
        assert_eq!(found.analysed_unix_s, Some(NOW_S.into()));
        let without: Vec<_> = found.without_class.iter().map(|it| &it.name[..]).collect();
        assert_eq!(without, ["s4", "s5"]);
        let [calm, lively] = &found.classes[..] else {
            panic!("two classes, not {:?}", found.classes);
        };
        assert_eq!(calm.tenants[0].machine_function, "calm");
        assert_eq!((calm.servers.len(), calm.cpu_permille), (2, Some(300)));
        let first = &calm.servers[0];
        assert_eq!((first.cores, first.memory_mib), (Some(12), Some(1_024)));
        assert_eq!(first.memory_permille, Some(50));
        // What is used now is more than the average, and less than the peak.
        let headroom = Headroom {
            short_permille: 700,
            medium_permille: 700,
            long_permille: 600,
        };
        assert_eq!(calm.headroom, Some(headroom));
        assert_eq!((lively.servers.len(), lively.headroom), (1, None));
        // The lively class says nothing, so that it counts for nothing.
        let constant = of_pattern(&found, TenantPattern::Constant);
        assert_eq!((constant.classes, constant.servers), (2, 3));
        let shares = [
            constant.cpu,
            constant.headroom_short,
            constant.headroom_medium,
            constant.headroom_long,
        ];
        assert_eq!(shares, [0.3, 0.7, 0.7, 0.6]);
        let periodic = of_pattern(&found, TenantPattern::Periodic);
        assert_eq!((periodic.classes, periodic.servers), (0, 0));
        assert!(periodic.cpu.is_nan() && periodic.headroom_long.is_nan());
    }

    #[test]
    fn what_no_server_says_is_not_made_up() {
        let found = classes(Some(&analysis()), vec![server("s1", "calm", None)]);
        assert_eq!(found.classes.len(), 2);
        for class in &found.classes {
            assert_eq!((class.cpu_permille, class.headroom), (None, None));
        }
        let nothing = classes(None, vec![server("s1", "calm", Some(1))]);
        assert_eq!(nothing.analysed_unix_s, None);
        assert_eq!((nothing.classes.len(), nothing.without_class.len()), (0, 1));
    }
}
