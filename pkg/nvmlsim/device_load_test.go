// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

// loadSaid is what NVML says of a GPU's load, each with its outcome.
func loadSaid(d *device) map[string]string {
	field := func(id, scope uint32) string {
		values := []nvml.FieldValue{{FieldId: id, ScopeId: scope}}
		if ret := d.GetFieldValues(values); ret != nvml.SUCCESS {
			return ret.Error()
		}
		return said(values[0].Value[0], nvml.Return(values[0].NvmlReturn))
	}
	utilization, ret := d.GetUtilizationRates()
	encoder, _, encoderRet := d.GetEncoderUtilization()
	decoder, _, decoderRet := d.GetDecoderUtilization()
	return map[string]string{
		"gpu": said(utilization.Gpu, ret), "memory": said(utilization.Memory, ret),
		"encoder": said(encoder, encoderRet), "decoder": said(decoder, decoderRet),
		"energy": said(d.GetTotalEnergyConsumption()), "sm clock": said(d.GetClockInfo(nvml.CLOCK_SM)),
		"pcie tx": said(d.GetPcieThroughput(nvml.PCIE_UTIL_TX_BYTES)), "pcie rx": said(d.GetPcieThroughput(nvml.PCIE_UTIL_RX_BYTES)),
		"nvlink tx": field(nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, allLinks), "nvlink rx": field(nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, allLinks),
		"one link": field(nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 0),
	}
}

func TestTheLoadIsToldAsFarAsTheProductTellsIt(t *testing.T) {
	load := Load{
		GPU: 90, Memory: 20, Encoder: 2, Decoder: 3, PCIeTransmit: 4, PCIeReceive: 5, NVLinkTransmit: 6, NVLinkReceive: 7, Energy: 8,
		Clocks: &ClockRates{SM: 1755},
	}
	all := map[string]string{
		"gpu": "90", "memory": "20", "encoder": "2", "decoder": "3", "energy": "8", "sm clock": "1755", "pcie tx": "4", "pcie rx": "5",
		"nvlink tx": "6", "nvlink rx": "7", "one link": "N/A",
	}
	but := func(more map[string]string) map[string]string {
		copied := map[string]string{}
		for _, m := range []map[string]string{all, more} {
			for name, value := range m {
				copied[name] = value
			}
		}
		return copied
	}
	none := map[string]string{"gpu": "N/A", "memory": "N/A", "encoder": "N/A", "decoder": "N/A"}
	for name, tc := range map[string]struct {
		profile string
		before  Command
		want    map[string]string
	}{
		"a whole GPU":          {"dgx-h100", nil, all},
		"one without NVLink":   {"t4", nil, but(map[string]string{"nvlink tx": "N/A", "nvlink rx": "N/A"})},
		"one with MIG enabled": {"dgx-h100", &SetMIG{GPU: "0", Enabled: true}, but(none)},
	} {
		t.Run(name, func(t *testing.T) {
			lib := open(t, mustNew(t, tc.profile))
			if tc.before != nil {
				do(t, lib.machine, tc.before)
			}
			do(t, lib.machine, &SetLoad{GPU: "0", Load: load})
			if diff := cmp.Diff(tc.want, loadSaid(lib.devices[0])); diff != "" {
				t.Errorf("loaded (-want +got):\n%s", diff)
			}
			if got := loadSaid(lib.devices[1])["energy"]; got != "0" {
				t.Errorf("another GPU has used %s mJ", got)
			}
			do(t, lib.machine, &UnloadDriver{})
			do(t, lib.machine, &LoadDriver{})
			lib.Init()
			if got := loadSaid(lib.devices[0])["energy"]; got != "0" {
				t.Errorf("after a reload of the driver it has used %s mJ", got)
			}
		})
	}
}

// monitored is what the performance monitor says of two samples.
func monitored(lib *Library, first, second nvml.GpmSample, metrics ...nvml.GpmMetricId) ([]float64, nvml.Return) {
	get := nvml.GpmMetricsGetType{NumMetrics: uint32(len(metrics)), Sample1: first, Sample2: second}
	for i, id := range metrics {
		get.Metrics[i].MetricId = uint32(id)
	}
	ret := lib.GpmMetricsGet(&get)
	var values []float64
	for i := range metrics {
		value := get.Metrics[i].Value
		if nvml.Return(get.Metrics[i].NvmlReturn) != nvml.SUCCESS {
			value = -1
		}
		values = append(values, value)
	}
	return values, ret
}

func TestThePerformanceMonitorTellsOfAGPUAndOfItsInstances(t *testing.T) {
	lib := open(t, mustNew(t, "dgx-h100"))
	d := lib.devices[0]
	do(t, lib.machine, &SetMIG{GPU: "0", Enabled: true})
	made := do(t, lib.machine, &CreateMIG{GPU: "0", Profile: "1g.10gb"})
	instance := made.MIG.Instance.GPU
	do(t, lib.machine, &SetLoad{GPU: "0", Load: Load{GPU: 50, SM: 10}})
	do(t, lib.machine, &SetLoad{GPU: "0", Instance: &instance, Load: Load{GPU: 90, SM: 70, Tensor: 60, Memory: 40}})
	sample := func(take func(nvml.GpmSample) nvml.Return) nvml.GpmSample {
		s, ret := lib.GpmSampleAlloc()
		if ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		if ret := take(s); ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		return s
	}
	whole := func() nvml.GpmSample { return sample(d.GpmSampleGet) }
	part := func() nvml.GpmSample {
		return sample(func(s nvml.GpmSample) nvml.Return { return d.GpmMigSampleGet(int(instance), s) })
	}
	ids := []nvml.GpmMetricId{
		nvml.GPM_METRIC_GRAPHICS_UTIL, nvml.GPM_METRIC_SM_UTIL, nvml.GPM_METRIC_ANY_TENSOR_UTIL, nvml.GPM_METRIC_DRAM_BW_UTIL,
		nvml.GPM_METRIC_SM_OCCUPANCY,
	}
	empty, _ := lib.GpmSampleAlloc()
	freed := part()
	freed.Free()
	for name, tc := range map[string]struct {
		first, second nvml.GpmSample
		want          []float64
		ret           nvml.Return
	}{
		"the GPU":             {whole(), whole(), []float64{50, 10, 0, 0, -1}, nvml.SUCCESS},
		"an instance":         {part(), part(), []float64{90, 70, 60, 40, -1}, nvml.SUCCESS},
		"one of each":         {whole(), part(), make([]float64, 5), nvml.ERROR_INVALID_ARGUMENT},
		"one that is empty":   {empty, empty, make([]float64, 5), nvml.ERROR_INVALID_ARGUMENT},
		"one that was freed":  {part(), freed, make([]float64, 5), nvml.ERROR_INVALID_ARGUMENT},
		"a sample of nothing": {part(), nil, make([]float64, 5), nvml.ERROR_INVALID_ARGUMENT},
	} {
		got, ret := monitored(lib, tc.first, tc.second, ids...)
		if diff := cmp.Diff(tc.want, got); diff != "" || ret != tc.ret {
			t.Errorf("%s: %v, want %v (-want +got):\n%s", name, ret, tc.ret, diff)
		}
	}
	// What is made in the place of an instance has counters of its own.
	before := part()
	do(t, lib.machine, &DestroyMIG{GPU: "0", Instance: instance})
	if ret := d.GpmMigSampleGet(int(instance), freed); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("an instance that is gone: %v", ret)
	}
	do(t, lib.machine, &CreateMIG{GPU: "0", Profile: "1g.10gb"})
	if _, ret := monitored(lib, before, part(), ids...); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("two instances in one place: %v", ret)
	}
}

func TestGPUsBeforeHopperHaveNoPerformanceMonitor(t *testing.T) {
	for profile, has := range map[string]bool{"t4": false, "dgx-a100": false, "l40s": false, "dgx-h100": true, "hgx-b200": true} {
		lib := open(t, mustNew(t, profile))
		support, _ := lib.devices[0].GpmQueryDeviceSupport()
		sample, _ := lib.GpmSampleAlloc()
		ret := lib.devices[0].GpmSampleGet(sample)
		if (support.IsSupportedDevice != 0) != has || (ret == nvml.SUCCESS) != has {
			t.Errorf("%s: said %d, a sample: %v; want it: %v", profile, support.IsSupportedDevice, ret, has)
		}
	}
}
