//! What NVML says of a machine.
//!
//! Owns the library, which is looked for at run time, and the questions. Called by `discover`, on a thread of its own,
//! since a driver may not answer. Refuses to fail for one question: what NVML does not say is left out and named. (Not asked is
//! a link's remote device type: nvml-wrapper 0.13 answers Unknown whatever the driver said. What is at the other end is told by its
//! bus id.)

use super::found::{Ancestor, Found, FoundGpu, FoundLink, FoundPair};
use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TopologyLevel};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use std::ffi::OsStr;

/// Most links of a GPU: NVML_NVLINK_MAX_LINKS.
const MAX_LINKS: u32 = 18;
/// NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: MB/s of a link, one direction.
const LINK_SPEED: FieldId = FieldId(90);

/// The library's names: the driver's own first, which containers have too.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Asks everything; no GPUs, and why, where there is no NVML.
pub(super) fn ask() -> Result<Found, NvmlError> {
    let [first, second] = LIBRARIES.map(OsStr::new);
    let open = |name| Nvml::builder().lib_path(name).init();
    let nvml = match open(first) {
        Err(NvmlError::LibloadingError(_)) => open(second)?,
        other => other?,
    };
    let mut found = Found {
        driver: nvml.sys_driver_version().ok(),
        ..Found::default()
    };
    let mut devices: Vec<Device<'_>> = Vec::new();
    for index in 0..nvml.device_count()? {
        let asked = nvml
            .device_by_index(index)
            .and_then(|device| Ok((gpu(&device)?, device)));
        match asked {
            Ok((gpu, device)) => {
                found.gpus.push(gpu);
                devices.push(device);
            }
            Err(error) => found
                .trouble
                .push(format!("GPU {index} of NVML is left out: {error}")),
        }
    }
    for (from, device) in devices.iter().enumerate() {
        for (to, peer) in devices.iter().enumerate() {
            if from != to {
                let status = |index| peer_status(device.p2p_status(peer, index));
                found.pairs.push(FoundPair {
                    from,
                    to,
                    ancestor: nvml
                        .topology_common_ancestor(device, peer)
                        .ok()
                        .map(ancestor),
                    read: status(P2pCapabilitiesIndex::Read),
                    write: status(P2pCapabilitiesIndex::Write),
                    atomics: status(P2pCapabilitiesIndex::Atomics),
                    nvlink: status(P2pCapabilitiesIndex::NvLink),
                });
            }
        }
    }
    Ok(found)
}

fn gpu(device: &Device<'_>) -> Result<FoundGpu, NvmlError> {
    Ok(FoundGpu {
        uuid: device.uuid()?,
        product: device.name()?,
        bus_id: bus_id(&device.pci_info()?.bus_id),
        max_generation: device.max_pcie_link_gen().ok(),
        max_width: device.max_pcie_link_width().ok(),
        width: device.current_pcie_link_width().ok(),
        nvlinks: links(device),
        ..FoundGpu::default()
    })
}

fn links(device: &Device<'_>) -> Vec<FoundLink> {
    let speed = || {
        let values = device.field_values_for(&[LINK_SPEED]).ok()?;
        match values.into_iter().next()?.ok()?.value.ok()? {
            SampleValue::U32(speed) => Some(speed),
            SampleValue::U64(speed) => u32::try_from(speed).ok(),
            SampleValue::I64(speed) => u32::try_from(speed).ok(),
            SampleValue::F64(_) => None,
        }
    };
    let mut links = Vec::new();
    for number in 0..MAX_LINKS {
        let link = device.link_wrapper_for(number);
        if link.is_active().unwrap_or(false) {
            links.push(FoundLink {
                version: link.version().ok(),
                speed_mbps: None,
                remote: link.remote_pci_info().ok().map(|info| bus_id(&info.bus_id)),
            });
        }
    }
    if let Some(speed) = (!links.is_empty()).then(speed).flatten() {
        for link in &mut links {
            link.speed_mbps = Some(speed);
        }
    }
    links
}

/// As sysfs writes it: NVML's domain has eight digits, in capitals.
fn bus_id(by_nvml: &str) -> String {
    let lower = by_nvml.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 => match domain.strip_prefix("0000") {
            Some(short) => format!("{short}:{rest}"),
            None => lower,
        },
        Some(_) | None => lower,
    }
}

fn ancestor(level: TopologyLevel) -> Ancestor {
    match level {
        TopologyLevel::Internal => Ancestor::Internal,
        TopologyLevel::Single => Ancestor::Single,
        TopologyLevel::Multiple => Ancestor::Multiple,
        TopologyLevel::HostBridge => Ancestor::HostBridge,
        TopologyLevel::Node => Ancestor::Node,
        TopologyLevel::System => Ancestor::System,
    }
}

fn peer_status(status: Result<P2pStatus, NvmlError>) -> String {
    match status {
        Ok(P2pStatus::Ok) => "ok",
        Ok(P2pStatus::ChipsetNotSupported) => "the chipset does not support it",
        Ok(P2pStatus::GpuNotSupported) => "the GPU does not support it",
        Ok(P2pStatus::IohTopologyNotSupported) => "not between these root complexes",
        Ok(P2pStatus::DisabledByRegkey) => "switched off by a setting of the driver",
        Ok(P2pStatus::NotSupported) => "not supported",
        // Not a no: the probe tells.
        Ok(P2pStatus::Unknown) | Err(_) => "",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_are_those_of_sysfs() {
        assert_eq!(bus_id("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(bus_id("00010000:01:00.0"), "00010000:01:00.0");
        assert_eq!(bus_id("0001:01:00.0"), "0001:01:00.0");
        assert_eq!(bus_id(""), "");
    }
}
