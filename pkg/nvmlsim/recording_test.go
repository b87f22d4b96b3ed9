// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/uuid"
)

// recording is what nvidia-smi -q -x said on a real node: the values of each fact, one for each GPU or one for all.
type recording map[string][]string

func readRecording(t *testing.T, name string) recording {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "recordings", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	r := recording{}
	for line := range strings.Lines(string(data)) {
		fact, values, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " =")
		if !ok {
			t.Fatalf("%s: line %q is no fact", name, line)
		}
		for value := range strings.SplitSeq(values, "|") {
			r[fact] = append(r[fact], strings.TrimSpace(value))
		}
	}
	return r
}

// of is the value for one GPU.
func (r recording) of(fact string, gpu int) string {
	if values := r[fact]; len(values) > 1 {
		return values[gpu]
	}
	return r[fact][0]
}

// recorded says which profile is of the recorded kind of machine, and what is not compared because the profile's machine is another one.
var recorded = map[string]struct {
	profile string
	// first is the profile's GPU that the recorded one is.
	first int
	// other facts, with the reason.
	other map[string]string
}{
	"a100":  {profile: "a100-40gb"},
	"gb300": {profile: "gb300"},
	"h100": {profile: "dgx-h100", other: with(onTheHost, map[string]string{
		"board_part_number": "one of the recorded GPUs was replaced by another board; the profile has that of the others",
	})},
	"b200":  {profile: "hgx-b200", other: onTheHost},
	"gb200": {profile: "gb200", other: onTheHost},
	"l40s": {profile: "l40s", other: with(onTheHost, map[string]string{
		"attached_gpus": "the profile is a server with eight",
	})},
	"t4": {profile: "t4", first: 3, other: map[string]string{
		"attached_gpus": "the profile is the larger machine of the same cloud", "minor_number": "its fourth GPU is at the recorded address",
		"ecc_errors/aggregate/dram_correctable": "the recorded GPU once had an error that was corrected",
	}},
}

// onTheHost: a virtual machine was recorded, and the profile is the machine itself.
var onTheHost = map[string]string{
	"gpu_virtualization_mode/virtualization_mode": "a virtual machine was recorded, and the profile is the machine itself",
	"pci/pci_bus":    "as above: addresses are the machine's",
	"pci/pci_domain": "as above: addresses are the machine's",
	"pci/pci_bus_id": "as above: addresses are the machine's",
	"board_id":       "as above: it is made of the address",
}

func with(all ...map[string]string) map[string]string {
	sum := map[string]string{}
	for _, m := range all {
		maps.Copy(sum, m)
	}
	return sum
}

// leftOut are the facts that are not simulated, by their beginnings.
var leftOut = map[string]string{
	"display_mode": "most drivers call it deprecated", "display_attached": "no function of NVML", "accounting_": "not asked for by anybody", "driver_model": "of Windows",
	"uuid": "replaced in the recording", "pdi": "replaced in the recording",
	"gpu_part_number": "no simulated firmware", "gpu_fru_part_number": "no simulated firmware", "inforom_": "no simulated firmware",
	"platformInfo": "places in a rack, not simulated", "gpu_operation_mode": "of GPUs before Pascal", "c2c_mode": "its function calls into the C library",
	"gpu_virtualization_mode/host_vgpu_mode": "no vGPUs", "gpu_virtualization_mode/vgpu_heterogeneous_mode": "no vGPUs",
	"ibmnpu": "of POWER", "pci/pci_gpu_link_info/pcie_gen/device_current_link_gen": "not asked for by anybody",
	"pci/pci_gpu_link_info/pcie_gen/max_host_link_gen": "not asked for by anybody", "pci/pci_bridge_chip": "of boards before Pascal",
	"pci/replay_": "counts what has happened", "pci/tx_util": "load", "pci/rx_util": "load", "pci/atomic_caps_": "not asked for by anybody",
	"sparse_operation_mode":         "not asked for by anybody",
	"clocks_event_reasons_counters": "count what has happened",
	"clocks_event_reasons/clocks_event_reason_applications_clocks_setting": "not asked for by anybody",
	"clocks_event_reasons/clocks_event_reason_display_clocks_setting":      "not asked for by anybody",
	"bar1_memory_usage/used": "a few MiB of the driver's own", "bar1_memory_usage/free": "the rest",
	"cc_protected_memory_usage": "confidential computing is not simulated", "dram_encryption_mode": "confidential computing is not simulated",
	"utilization/jpeg_util": "load", "utilization/ofa_util": "load",
	"encoder_stats": "load", "fbc_stats": "load",
	"ecc_errors/aggregate_uncorrectable_sram_sources": "errors are in the device memory or not at all", "ecc_errors/channel_repair_pending": "not simulated",
	"ecc_errors/tpc_repair_pending": "not simulated", "ecc_errors/unrepairable_memory": "not simulated",
	"ecc_errors/aggregate/sram_threshold_exceeded": "errors are in the device memory or not at all",
	"retired_pages": "GPUs up to Turing retire pages, which is not simulated", "remapped_rows/row_remapper_histogram": "not simulated",
	"remapped_rows/remapped_row_corr_inactive": "not simulated", "remapped_rows/remapped_row_unc_inactive": "not simulated",
	"temperature/gpu_temp_max_gpu_": "where a GPU of the consumer's slows down", "temperature/gpu_target_temperature": "of the consumer's",
	"temperature/memory_temp": "not simulated", "temperature/gpu_temp_max_mem_": "not simulated", "supported_gpu_target_temp": "of the consumer's",
	"gpu_power_readings/power_state": "another word for the performance state", "gpu_power_readings/average_power_draw": "one reading, where GPUs have two",
	"gpu_memory_power_readings": "not simulated", "module_power_readings": "not simulated", "power_smoothing": "not simulated",
	"power_profiles": "not simulated", "edpp_multiplier": "not simulated", "voltage": "not simulated",
	"applications_clocks": "not asked for by anybody", "default_applications_clocks": "not asked for by anybody",
	"deferred_clocks": "not asked for by anybody", "max_customer_boost_clocks": "not asked for by anybody", "clock_policy": "not asked for by anybody",
	"fabric/health": "its function calls into the C library", "fabric/clusterUuid": "replaced in the recording; zeros are compared",
	"accounted_processes": "not asked for by anybody", "capabilities/egm": "not simulated",
	"gpu_reset_status": "an older form of the recovery action",
}

// asked are the facts that are compared, as the simulated library has them, in the words of nvidia-smi.
func asked(t *testing.T, lib *Library, first int) map[string]func(i int) string {
	gpu := func(i int) nvml.Device {
		d, ret := lib.DeviceGetHandleByIndex(first + i)
		if ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		return d
	}
	sysfs := func(i int, file string) string {
		info, _ := gpu(i).GetPciInfo()
		data, err := fs.ReadFile(lib.Sysfs(), fmt.Sprintf("bus/pci/devices/%04x:%02x:%02x.0/%s", info.Domain, info.Bus, info.Device, file))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(data))
	}
	facts := map[string]func(i int) string{
		"driver_version": func(int) string { return said(lib.SystemGetDriverVersion()) },
		"cuda_version": func(int) string {
			v, _ := lib.SystemGetCudaDriverVersion()
			return fmt.Sprintf("%d.%d", v/1000, v%1000/10)
		},
		"attached_gpus": func(int) string { return said(lib.DeviceGetCount()) },
		"product_name":  func(i int) string { return said(gpu(i).GetName()) },
		"product_brand": func(i int) string {
			brand, _ := gpu(i).GetBrand()
			return strings.ToUpper(wordOf(brands, brand))
		},
		"product_architecture": func(i int) string {
			arch, _ := gpu(i).GetArchitecture()
			return wordOf(architectures, arch)
		},
		"display_active":       func(i int) string { return onOff(gpu(i).GetDisplayActive()) },
		"vbios_version":        func(i int) string { return said(gpu(i).GetVbiosVersion()) },
		"board_part_number":    func(i int) string { return said(gpu(i).GetBoardPartNumber()) },
		"gsp_firmware_version": func(i int) string { return said(gpu(i).GetGspFirmwareVersion()) },
		"multigpu_board":       func(i int) string { several, ret := gpu(i).GetMultiGpuBoard(); return yesNo(several != 0, ret) },
		"fan_speed": func(i int) string {
			fans, ret := gpu(i).GetNumFans()
			return strings.ReplaceAll(said(fans, ret), "0", "N/A")
		},
		"persistence_mode": func(i int) string { return onOff(gpu(i).GetPersistenceMode()) },
		"addressing_mode": func(i int) string {
			mode, _ := gpu(i).GetAddressingMode()
			return wordOf(addressingModes, nvml.DeviceAddressingModeType(mode.Value))
		},
		"mig_mode/current_mig": func(i int) string {
			current, _, ret := gpu(i).GetMigMode()
			return onOff(nvml.EnableState(current), ret)
		},
		"mig_mode/pending_mig": func(i int) string {
			_, pending, ret := gpu(i).GetMigMode()
			return onOff(nvml.EnableState(pending), ret)
		},
		"mig_devices": func(i int) string {
			if d, ret := gpu(i).GetMigDeviceHandleByIndex(0); ret == nvml.SUCCESS {
				return said(d.GetUUID())
			}
			return "None"
		},
		"minor_number": func(i int) string { return said(gpu(i).GetMinorNumber()) },
		"board_id": func(i int) string {
			id, _ := gpu(i).GetBoardId()
			return fmt.Sprintf("%#x", id)
		},
		"gpu_virtualization_mode/virtualization_mode": func(i int) string {
			mode, _ := gpu(i).GetVirtualizationMode()
			return map[nvml.GpuVirtualizationMode]string{nvml.GPU_VIRTUALIZATION_MODE_NONE: "None", nvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH: "Pass-Through"}[mode]
		},
		"gpu_recovery_action": func(i int) string {
			return map[string]string{"0": "None"}[field(gpu(i), nvml.FI_DEV_GET_GPU_RECOVERY_ACTION)]
		},
		"pci/pci_bus":    pci(gpu, "%02X", func(p nvml.PciInfo) any { return p.Bus }),
		"pci/pci_device": pci(gpu, "%02X", func(p nvml.PciInfo) any { return p.Device }),
		"pci/pci_domain": pci(gpu, "%04X", func(p nvml.PciInfo) any { return p.Domain }),
		"pci/pci_bus_id": pci(gpu, "%s", func(p nvml.PciInfo) any {
			return fmt.Sprintf("%08X:%02X:%02X.0", p.Domain, p.Bus, p.Device)
		}),
		"pci/pci_device_id":                                  pci(gpu, "%08X", func(p nvml.PciInfo) any { return p.PciDeviceId }),
		"pci/pci_sub_system_id":                              pci(gpu, "%08X", func(p nvml.PciInfo) any { return p.PciSubSystemId }),
		"pci/pci_base_class":                                 func(i int) string { return strings.TrimPrefix(sysfs(i, "class")[2:4], "0") },
		"pci/pci_sub_class":                                  func(i int) string { return strings.TrimPrefix(sysfs(i, "class")[4:6], "0") },
		"pci/pci_gpu_link_info/pcie_gen/max_link_gen":        func(i int) string { return said(gpu(i).GetMaxPcieLinkGeneration()) },
		"pci/pci_gpu_link_info/pcie_gen/current_link_gen":    func(i int) string { return said(gpu(i).GetCurrPcieLinkGeneration()) },
		"pci/pci_gpu_link_info/pcie_gen/max_device_link_gen": func(i int) string { return said(gpu(i).GetGpuMaxPcieLinkGeneration()) },
		"pci/pci_gpu_link_info/link_widths/max_link_width":   func(i int) string { return said(gpu(i).GetMaxPcieLinkWidth()) + "x" },
		"pci/pci_gpu_link_info/link_widths/current_link_width": func(i int) string {
			return said(gpu(i).GetCurrPcieLinkWidth()) + "x"
		},
		"performance_state": func(i int) string { return "P" + said(gpu(i).GetPerformanceState()) },
		"bar1_memory_usage/total": func(i int) string {
			bar1, _ := gpu(i).GetBAR1MemoryInfo()
			return fmt.Sprintf("%d MiB", bar1.Bar1Total/mib)
		},
		"compute_mode": func(i int) string {
			mode, _ := gpu(i).GetComputeMode()
			return wordOf(computeModes, mode)
		},
		"ecc_mode/current_ecc": func(i int) string {
			current, _, ret := gpu(i).GetEccMode()
			return onOff(current, ret)
		},
		"ecc_mode/pending_ecc": func(i int) string {
			_, pending, ret := gpu(i).GetEccMode()
			return onOff(pending, ret)
		},
		"utilization/gpu_util": func(i int) string {
			load, _ := gpu(i).GetUtilizationRates()
			return fmt.Sprintf("%d %%", load.Gpu)
		},
		"utilization/memory_util": func(i int) string {
			load, _ := gpu(i).GetUtilizationRates()
			return fmt.Sprintf("%d %%", load.Memory)
		},
		"utilization/encoder_util": func(i int) string {
			percent, _, ret := gpu(i).GetEncoderUtilization()
			return said(percent, ret) + " %"
		},
		"utilization/decoder_util": func(i int) string {
			percent, _, ret := gpu(i).GetDecoderUtilization()
			return said(percent, ret) + " %"
		},
		"remapped_rows": func(i int) string {
			_, _, _, _, ret := gpu(i).GetRemappedRows()
			return strings.ReplaceAll(said(0, ret), "0", "counted")
		},
		"remapped_rows/remapped_row_corr":    func(i int) string { c, _, _, _, ret := gpu(i).GetRemappedRows(); return said(c, ret) },
		"remapped_rows/remapped_row_unc":     func(i int) string { _, u, _, _, ret := gpu(i).GetRemappedRows(); return said(u, ret) },
		"remapped_rows/remapped_row_pending": func(i int) string { _, _, p, _, ret := gpu(i).GetRemappedRows(); return yesNo(p, ret) },
		"remapped_rows/remapped_row_failure": func(i int) string { _, _, _, f, ret := gpu(i).GetRemappedRows(); return yesNo(f, ret) },
		"temperature/gpu_temp":               func(i int) string { return said(gpu(i).GetTemperature(nvml.TEMPERATURE_GPU)) + " C" },
		"temperature/gpu_temp_tlimit": func(i int) string {
			margin, ret := gpu(i).GetMarginTemperature()
			return celsius(said(margin.MarginTemperature, ret))
		},
		"temperature/gpu_temp_slow_threshold": func(i int) string {
			return celsius(said(gpu(i).GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SLOWDOWN)))
		},
		"temperature/gpu_temp_max_threshold": func(i int) string {
			return celsius(said(gpu(i).GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SHUTDOWN)))
		},
		"temperature/gpu_temp_slow_tlimit_threshold": func(i int) string {
			return celsius(field(gpu(i), nvml.FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT))
		},
		"temperature/gpu_temp_max_tlimit_threshold": func(i int) string {
			return celsius(field(gpu(i), nvml.FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT))
		},
		"gpu_power_readings/instant_power_draw":    func(i int) string { return watts(gpu(i).GetPowerUsage()) },
		"gpu_power_readings/current_power_limit":   func(i int) string { return watts(gpu(i).GetEnforcedPowerLimit()) },
		"gpu_power_readings/requested_power_limit": func(i int) string { return watts(gpu(i).GetPowerManagementLimit()) },
		"gpu_power_readings/default_power_limit":   func(i int) string { return watts(gpu(i).GetPowerManagementDefaultLimit()) },
		"gpu_power_readings/min_power_limit": func(i int) string {
			lowest, _, ret := gpu(i).GetPowerManagementLimitConstraints()
			return watts(lowest, ret)
		},
		"gpu_power_readings/max_power_limit": func(i int) string {
			_, highest, ret := gpu(i).GetPowerManagementLimitConstraints()
			return watts(highest, ret)
		},
		"fabric/state": func(i int) string {
			fabric, ret := gpu(i).GetGpuFabricInfo()
			return strings.ReplaceAll(said(fabric.State, ret), fmt.Sprint(nvml.GPU_FABRIC_STATE_COMPLETED), "Completed")
		},
		"fabric/status": func(i int) string {
			fabric, ret := gpu(i).GetGpuFabricInfo()
			return strings.ReplaceAll(said(fabric.Status, ret), "0", "Success")
		},
		"fabric/cliqueId": func(i int) string {
			fabric, ret := gpu(i).GetGpuFabricInfo()
			return said(fabric.CliqueId, ret)
		},
		"processes": func(i int) string {
			list, _ := gpu(i).GetComputeRunningProcesses()
			return strings.TrimPrefix(fmt.Sprint(len(list)), "0")
		},
	}
	for fact, bit := range map[string]uint64{
		"gpu_idle": nvml.ClocksEventReasonGpuIdle, "sw_power_cap": nvml.ClocksEventReasonSwPowerCap,
		"hw_slowdown": nvml.ClocksThrottleReasonHwSlowdown, "hw_thermal_slowdown": nvml.ClocksThrottleReasonHwThermalSlowdown,
		"hw_power_brake_slowdown": nvml.ClocksThrottleReasonHwPowerBrakeSlowdown, "sync_boost": nvml.ClocksEventReasonSyncBoost,
		"sw_thermal_slowdown": nvml.ClocksEventReasonSwThermalSlowdown,
	} {
		facts["clocks_event_reasons/clocks_event_reason_"+fact] = func(i int) string {
			mask, _ := gpu(i).GetCurrentClocksEventReasons()
			return map[bool]string{true: "Active", false: "Not Active"}[mask&bit != 0]
		}
	}
	for fact, domain := range map[string]nvml.ClockType{
		"graphics": nvml.CLOCK_GRAPHICS, "sm": nvml.CLOCK_SM, "mem": nvml.CLOCK_MEM, "video": nvml.CLOCK_VIDEO,
	} {
		facts["clocks/"+fact+"_clock"] = func(i int) string { return said(gpu(i).GetClockInfo(domain)) + " MHz" }
		facts["max_clocks/"+fact+"_clock"] = func(i int) string { return said(gpu(i).GetMaxClockInfo(domain)) + " MHz" }
	}
	for fact, of := range map[string]func(nvml.Memory_v2) uint64{
		"total": func(m nvml.Memory_v2) uint64 { return m.Total }, "reserved": func(m nvml.Memory_v2) uint64 { return m.Reserved },
		"used": func(m nvml.Memory_v2) uint64 { return m.Used }, "free": func(m nvml.Memory_v2) uint64 { return m.Free },
	} {
		facts["fb_memory_usage/"+fact] = func(i int) string {
			memory, _ := gpu(i).GetMemoryInfo_v2()
			return fmt.Sprintf("%d MiB", of(memory)/mib)
		}
	}
	for kind, counter := range map[string]nvml.EccCounterType{"volatile": nvml.VOLATILE_ECC, "aggregate": nvml.AGGREGATE_ECC} {
		for _, place := range []struct {
			fact string
			kind nvml.MemoryErrorType
			at   nvml.MemoryLocation
		}{
			{"sram_correctable", nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.MEMORY_LOCATION_SRAM},
			{"sram_uncorrectable", nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.MEMORY_LOCATION_SRAM},
			{"sram_uncorrectable_parity", nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.MEMORY_LOCATION_SRAM},
			{"sram_uncorrectable_secded", nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.MEMORY_LOCATION_SRAM},
			{"dram_correctable", nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.MEMORY_LOCATION_DRAM},
			{"dram_uncorrectable", nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.MEMORY_LOCATION_DRAM},
		} {
			facts["ecc_errors/"+kind+"/"+place.fact] = func(i int) string {
				return said(gpu(i).GetMemoryErrorCounter(place.kind, counter, place.at))
			}
		}
	}
	return facts
}

// said is an answer as nvidia-smi prints it.
func said[T any](value T, ret nvml.Return) string {
	if ret != nvml.SUCCESS {
		return "N/A"
	}
	return fmt.Sprint(value)
}

func onOff(state nvml.EnableState, ret nvml.Return) string {
	if ret != nvml.SUCCESS {
		return "N/A"
	}
	return map[nvml.EnableState]string{nvml.FEATURE_ENABLED: "Enabled", nvml.FEATURE_DISABLED: "Disabled"}[state]
}

func yesNo(yes bool, ret nvml.Return) string {
	if ret != nvml.SUCCESS {
		return "N/A"
	}
	return map[bool]string{true: "Yes", false: "No"}[yes]
}

func celsius(text string) string {
	if text == "N/A" {
		return text
	}
	return text + " C"
}

func watts(milliwatts uint32, ret nvml.Return) string {
	if ret != nvml.SUCCESS {
		return "N/A"
	}
	return fmt.Sprintf("%.2f W", float64(milliwatts)/1000)
}

func field(d nvml.Device, id uint32) string {
	values := []nvml.FieldValue{{FieldId: id}}
	ret := d.GetFieldValues(values)
	if ret == nvml.SUCCESS {
		ret = nvml.Return(values[0].NvmlReturn)
	}
	return said(int32(values[0].Value[0])|int32(values[0].Value[1])<<8|int32(values[0].Value[2])<<16|int32(values[0].Value[3])<<24, ret)
}

func pci(gpu func(int) nvml.Device, format string, of func(nvml.PciInfo) any) func(i int) string {
	return func(i int) string {
		info, _ := gpu(i).GetPciInfo()
		return fmt.Sprintf(format, of(info))
	}
}

// wordOf is the key of a value.
func wordOf[K ~string, V comparable](table map[K]V, value V) string {
	for word, v := range table {
		if v == value {
			return string(word)
		}
	}
	return "?"
}

// about are the facts of which a profile has one rounded value for all its GPUs: that of the first recorded one, give or take so much.
var about = map[string]float64{
	"temperature/gpu_temp": 0, "temperature/gpu_temp_tlimit": 0, "gpu_power_readings/instant_power_draw": 1, "fb_memory_usage/free": 1,
}

func near(got, want string, tolerance float64) bool {
	number := func(text string) float64 {
		n, err := strconv.ParseFloat(strings.Fields(text + " ?")[0], 64)
		if err != nil {
			return math.NaN()
		}
		return n
	}
	return got == want || math.Abs(number(got)-number(want)) <= tolerance
}

// TestProfilesAreWhatWasRecorded compares the seven recorded nodes with the profiles of such machines, fact by fact: each fact is compared,
// or is listed with the reason why it is not.
func TestProfilesAreWhatWasRecorded(t *testing.T) {
	unused := maps.Clone(leftOut)
	for name, node := range recorded {
		t.Run(name, func(t *testing.T) {
			r := readRecording(t, name)
			lib := open(t, mustNew(t, node.profile))
			facts := asked(t, lib, node.first)
			others := maps.Clone(node.other)
			gpus, _ := strconv.Atoi(r.of("attached_gpus", 0))
			compared := 0
			for _, fact := range slices.Sorted(maps.Keys(r)) {
				prefix, out := beginning(leftOut, fact)
				_, other := node.other[fact]
				ask, ok := facts[fact]
				delete(others, fact)
				delete(unused, prefix)
				switch {
				case ok && out, !ok && other:
					t.Errorf("%s is both compared and left out", fact)
				case other, out:
				case fact == "serial":
					compared++
					checkSerials(t, lib, r[fact])
				case !ok:
					t.Errorf("%s is neither compared nor left out", fact)
				default:
					compared++
					tolerance, first := about[fact]
					for i := range gpus {
						if got, want := ask(i), r.of(fact, i); !near(got, want, tolerance) {
							t.Errorf("%s of GPU %d: %q, recorded is %q", fact, i, got, want)
						}
						if first {
							break
						}
					}
				}
			}
			for fact := range others {
				t.Errorf("%s is left out and was not recorded", fact)
			}
			if compared < 65 {
				t.Errorf("%d facts were compared", compared)
			}
			if fabric := lib.Profile().Fabric; fabric != nil {
				none := uuid.Nil.String()
				if (r.of("fabric/clusterUuid", 0) == none) != (fabric.ClusterUUID == none) {
					t.Errorf("fabric of cluster %s, recorded is %s", fabric.ClusterUUID, r.of("fabric/clusterUuid", 0))
				}
			}
		})
	}
	for prefix := range unused {
		t.Errorf("%s is left out and was not recorded", prefix)
	}
}

// beginning returns the key that the fact begins with.
func beginning(of map[string]string, fact string) (prefix string, ok bool) {
	for prefix := range of {
		if fact == prefix || strings.HasPrefix(fact, strings.TrimSuffix(prefix, "/")+"/") || strings.HasSuffix(prefix, "_") && strings.HasPrefix(fact, prefix) {
			return prefix, true
		}
	}
	return "", false
}

// checkSerials checks that the same GPUs have one serial number: those of one board.
func checkSerials(t *testing.T, lib *Library, recorded []string) {
	t.Helper()
	for i := range recorded {
		for j := range i {
			a, _ := lib.devices[i].GetSerial()
			b, _ := lib.devices[j].GetSerial()
			if (a == b) != (recorded[i] == recorded[j]) {
				t.Errorf("GPUs %d and %d have the serial numbers %s and %s, recorded are %s and %s", j, i, b, a, recorded[j], recorded[i])
			}
		}
	}
}
