// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package exporter

import (
	"context"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/podresources"
	"stowage.dev/stowage/pkg/nvmlsim"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// partitioned makes a MIG device on GPU i, and returns the device as a claim has it for which it was made.
func (r *rig) partitioned(i int, gpu, profile string, start uint32) (nvmlsim.MIGDevice, ledger.Device) {
	made := r.do(&nvmlsim.CreateMIG{GPU: gpu, Profile: profile, Start: &start}).MIG
	name := r.gpu(i) + "-mig-" + strings.ReplaceAll(profile, ".", "") + "-" + gpu
	return *made, ledger.Device{
		Device: name, GPU: r.gpu(i), UUID: made.UUID, GPUUUID: r.node.GPUs[i].UUID, Partition: &ledger.Partition{Profile: profile, Start: start, Size: 1},
	}
}

// TestMetricsOfANode: a whole GPU with two containers, one with a partition made on demand and another that nobody has, shares of two pods, a
// device plugin's, and one without a pod.
func TestMetricsOfANode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 5)
		r.runs("whole-0", r.prepared("whole", ledger.Device{Device: r.gpu(0), GPU: r.gpu(0), UUID: r.node.GPUs[0].UUID}), "main", "sidecar")
		r.do(&nvmlsim.SetLoad{GPU: "0", Load: nvmlsim.Load{
			GPU: 97, SM: 61, Tensor: 44, Memory: 38, Encoder: 5, Decoder: 6, PCIeTransmit: 1200, PCIeReceive: 3400,
			NVLinkTransmit: 1 << 20, NVLinkReceive: 1 << 21, Energy: 123456, Clocks: &nvmlsim.ClockRates{Graphics: 1755, SM: 1755, Memory: 2619, Video: 1545},
		}})
		r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 7, Kind: nvmlsim.ProcessCompute, MemoryMiB: 40960}})
		r.do(&nvmlsim.SetThrottle{GPU: "0", Reasons: []string{"sw-power-cap"}})

		r.do(&nvmlsim.SetMIG{GPU: "1", Enabled: true})
		made, device := r.partitioned(1, "1", "1g.10gb", 0)
		r.runs("mig-0", r.prepared("mig", device), "main")
		r.do(&nvmlsim.SetLoad{GPU: "1", Instance: &made.Instance.GPU, Load: nvmlsim.Load{GPU: 80, SM: 70, Tensor: 60, Memory: 50}})
		r.do(&nvmlsim.AddProcess{GPU: "1", Process: nvmlsim.Process{PID: 8, Kind: nvmlsim.ProcessCompute, MemoryMiB: 512, Instance: &made.Instance}})
		r.partitioned(1, "1", "2g.20gb", 4)

		for _, pod := range []string{"share-0", "share-1"} {
			r.runs(pod, r.prepared(pod, ledger.Device{
				Device: r.gpu(2), GPU: r.gpu(2), UUID: r.node.GPUs[2].UUID, Share: &ledger.Share{}, ShareID: ptr(types.UID("id-" + pod)),
			}), "main")
		}
		r.plugged("plugin-0", "nvidia.com/gpu.shared", r.node.GPUs[3].UUID+"::1")
		r.offers = []podresources.Devices{{Resource: "nvidia.com/gpu.shared", IDs: []string{r.node.GPUs[3].UUID + "::0", r.node.GPUs[3].UUID + "::1"}}}
		r.do(&nvmlsim.CountECC{GPU: "3", ECCCounts: nvmlsim.ECCCounts{Corrected: 3, Uncorrected: 1}})

		r.scrape()
		time.Sleep(15 * time.Second)
		golden(t, filepath.Join("testdata", "node.txt"), r.scrape(), *update)
	})
}

// TestWhatAProductDoesNotTellIsAbsent: 0 would say that it is idle.
func TestWhatAProductDoesNotTellIsAbsent(t *testing.T) {
	for profile, tc := range map[string]struct{ has, lacks []string }{
		"t4":       {has: []string{"util_ratio", "memory_used_bytes", "clock_hertz"}, lacks: []string{"nvlink_tx_bytes_total", "sm_util_ratio"}},
		"dgx-a100": {has: []string{"util_ratio", "nvlink_tx_bytes_total"}, lacks: []string{"sm_util_ratio", "tensor_util_ratio", "clock_hertz"}},
		"dgx-h100": {has: []string{"util_ratio", "sm_util_ratio", "memory_bandwidth_util_ratio"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, profile, 2)
			first := r.scrape()
			time.Sleep(DefaultInterval)
			second := r.scrape()
			for _, name := range tc.has {
				if n := len(found(second, "stowage_gpu_"+name)); n < 2 {
					t.Errorf("%s: %d series of %s", profile, n, name)
				}
			}
			for _, name := range tc.lacks {
				if n := len(found(second, "stowage_gpu_"+name)); n > 0 {
					t.Errorf("%s: %d series of %s", profile, n, name)
				}
			}
			if n := len(found(first, "stowage_gpu_sm_util_ratio")); n > 0 {
				t.Errorf("%s: %d rates before there are two samples", profile, n)
			}
		})
	}
}

// TestManyScrapesReadOnce: whoever asks how often, GPUs are read once in an interval.
func TestManyScrapesReadOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 2)
		for range 10 {
			r.scrape()
			time.Sleep(time.Second - time.Millisecond)
		}
		if n := r.reads.Load(); n != 2 {
			t.Errorf("two GPUs are read %d times within an interval", n)
		}
		time.Sleep(time.Second)
		r.scrape()
		if n := r.reads.Load(); n != 4 {
			t.Errorf("they are read %d times in two", n)
		}
	})
}

// TestAGPUThatHangsHoldsNoScrape: its last reading is told for a minute, the other GPU's are new, and it is not asked twice at once.
func TestAGPUThatHangsHoldsNoScrape(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 2)
		of := func(i int) string { return `gpu="` + r.gpu(i) + `"` }
		r.scrape()
		r.do(&nvmlsim.HangGPU{GPU: "0"})
		r.do(&nvmlsim.SetTemperature{GPU: "1", Celsius: ptr(uint32(60))})
		for i := range 3 {
			time.Sleep(DefaultInterval)
			start := time.Now()
			text := r.scrape()
			if took := time.Since(start); took > Patience {
				t.Errorf("scrape %d takes %s", i, took)
			}
			r.expect("while it hangs", text, "stowage_gpu_temperature_celsius", []string{"29"}, of(0))
			r.expect("beside one that hangs", text, "stowage_gpu_temperature_celsius", []string{"60"}, of(1))
		}
		if n := r.reads.Load(); n != 1+1+4 {
			t.Errorf("%d readings have begun, want one of the GPU that hangs", n)
		}
		time.Sleep(KeepReading)
		text := r.scrape()
		r.expect("after a minute", text, "stowage_gpu_temperature_celsius", nil, of(0))
		r.expect("after a minute", text, "stowage_gpu_reading_age_seconds", nil, of(0))
		r.expect("after a minute", text, "stowage_gpu_info", []string{"1"}, of(0))
		r.do(&nvmlsim.UnhangGPU{GPU: "0"})
		time.Sleep(DefaultInterval)
		r.expect("when it answers again", r.scrape(), "stowage_gpu_temperature_celsius", []string{"29"}, of(0))
	})
}

// TestAGPUThatIsLostHasNoValues at once, and those of a claim that has it keep their labels.
func TestAGPUThatIsLostHasNoValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 2)
		r.runs("p", r.prepared("c", ledger.Device{Device: r.gpu(0), GPU: r.gpu(0), UUID: r.node.GPUs[0].UUID}), "main")
		r.expect("before", r.scrape(), "stowage_gpu_util_ratio", []string{"0"}, `pod="p"`)
		r.do(&nvmlsim.LoseGPU{GPU: "0"})
		time.Sleep(DefaultInterval)
		text := r.scrape()
		r.expect("lost", text, "stowage_gpu_util_ratio", nil, `pod="p"`)
		r.expect("lost", text, "stowage_gpu_info", []string{"1"}, `pod="p"`)
		r.expect("the other one", text, "stowage_gpu_util_ratio", []string{"0"}, r.gpu(1))
	})
}

// TestAGPUOfAVirtualMachineHasNoValues at once: what was read before is not what the virtual machine does.
func TestAGPUOfAVirtualMachineHasNoValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 2)
		r.scrape()
		r.node = &discovery.Node{GPUs: slices.Clone(r.node.GPUs)}
		r.node.GPUs[0].Passthrough = &discovery.Passthrough{Bound: true}
		r.runs("vm", r.prepared("c", ledger.Device{Device: r.gpu(0) + "-vfio", GPU: r.gpu(0), Passthrough: true}), "main")
		time.Sleep(DefaultInterval)
		text := r.scrape()
		r.expect("passed through", text, "stowage_gpu_info", []string{"1"}, `pod="vm"`)
		r.expect("passed through", text, "stowage_gpu_util_ratio", nil, r.gpu(0))
		r.expect("the other one", text, "stowage_gpu_util_ratio", []string{"0"}, r.gpu(1))
	})
}

// guarded is a library that samples of GPUs are freed of only while somebody uses its session.
type guarded struct {
	gonvml.Interface
	rig  *rig
	held atomic.Int32
}

func (g *guarded) GpmSampleAlloc() (gonvml.GpmSample, gonvml.Return) {
	g.held.Add(1)
	s, ret := g.Interface.GpmSampleAlloc()
	return guardedSample{s, g}, ret
}

type guardedSample struct {
	gonvml.GpmSample
	library *guarded
}

func (s guardedSample) Free() gonvml.Return {
	s.library.held.Add(-1)
	if s.library.rig.users.Load() == 0 {
		s.library.rig.t.Error("a sample is freed while nobody uses the session")
	}
	return s.GpmSample.Free()
}

// TestNoSampleIsFreedBesideItsSession, which may be closed at that time: if the driver goes, or a GPU does.
func TestNoSampleIsFreedBesideItsSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 3)
		library := &guarded{Interface: r.handle.Raw, rig: r}
		open := func() {
			r.handle.Library = nvml.Adapt(library, "guarded")
			if err := r.handle.Init(); err != nil {
				t.Fatal(err)
			}
		}
		end := func(when string) {
			r.users.Add(1)
			defer r.users.Add(-1)
			if err := r.handle.Shutdown(); err != nil {
				t.Fatal(err)
			}
			if n := library.held.Load(); n != 0 {
				t.Errorf("%s, and NVML holds %d samples", when, n)
			}
		}
		expect := func(when string, least, most int32) {
			r.scrape()
			if n := library.held.Load(); n < least || n > most {
				t.Errorf("%s: NVML holds %d samples, want %d to %d", when, n, least, most)
			}
			time.Sleep(DefaultInterval)
		}
		open()
		expect("at first", 3, 3)
		expect("read again", 3, 3+3)
		end("the driver goes")
		r.gone = nvml.ErrNoSession
		expect("the driver is gone", 0, 0)
		r.gone = nil
		open()
		expect("the driver is back", 3, 3)
		r.node = &discovery.Node{GPUs: r.node.GPUs[2:]}
		expect("two GPUs are taken out", 1, 3+1)
		expect("the one that is left is read again", 2, 2)
		end("the session ends")
		open() // for the rig's own end
	})
}

// TestAPodsLabelsAreGoneWithThePod, and with its claim, if the kubelet is away.
func TestAPodsLabelsAreGoneWithThePod(t *testing.T) {
	const used = "stowage_gpu_memory_used_bytes"
	for name, tc := range map[string]struct {
		then func(r *rig)
		// pods have series after that, and unlabelled are those with a claim alone, and with nothing.
		pods, claims, free int
		up                 string
	}{
		"nothing happens":           {func(*rig) {}, 2, 0, 0, "1"},
		"the pod ends":              {func(r *rig) { r.pods = r.pods[1:]; r.released("c0") }, 1, 0, 1, "1"},
		"its claim stays prepared":  {func(r *rig) { r.pods = r.pods[1:] }, 1, 1, 0, "1"},
		"the kubelet is away":       {func(r *rig) { r.away = errAway; r.pods = nil }, 2, 0, 0, "0"},
		"away, and the claim ends":  {func(r *rig) { r.away = errAway; r.released("c0") }, 1, 0, 1, "0"},
		"away for too long":         {func(r *rig) { r.away = errAway; time.Sleep(podresources.Keep) }, 0, 2, 0, "0"},
		"it hangs for too long":     {func(r *rig) { r.hangs = make(chan struct{}); time.Sleep(podresources.Keep) }, 0, 2, 0, "1"},
		"the ledger is ill":         {func(r *rig) { r.ill = errAway; r.records = nil }, 2, 0, 0, "1"},
		"ill for too long":          {func(r *rig) { r.ill = errAway; time.Sleep(podresources.Keep) }, 0, 0, 2, "1"},
		"the kubelet starts":        {func(r *rig) { r.pods = nil }, 2, 0, 0, "0"},
		"a record cannot be read":   {func(r *rig) { r.records[0] = &ledger.Record{UID: "x", Err: errAway} }, 1, 0, 1, "1"},
		"a claim is being prepared": {func(r *rig) { r.records[0].Entry.State = ledger.PrepareStarted }, 1, 0, 1, "1"},
		"admin access":              {func(r *rig) { r.records[0].Entry.Devices[0].AdminAccess = true }, 1, 0, 1, "1"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, "dgx-h100", 2)
				for i, claim := range []string{"c0", "c1"} {
					r.runs("pod-"+claim, r.prepared(claim, ledger.Device{Device: r.gpu(i), GPU: r.gpu(i), UUID: r.node.GPUs[i].UUID}), "main")
				}
				r.scrape()
				tc.then(r)
				time.Sleep(DefaultInterval)
				text := r.scrape()
				if r.hangs != nil {
					close(r.hangs)
				}
				all, free := len(found(text, used)), len(found(text, used, `pod=""`, `claim=""`))
				claims := len(found(text, used, `pod=""`)) - free
				if pods := all - claims - free; pods != tc.pods || claims != tc.claims || free != tc.free {
					t.Errorf("%d series have a pod, %d a claim alone, %d neither; want %d, %d, %d", pods, claims, free, tc.pods, tc.claims, tc.free)
				}
				if want := "stowage_gpu_exporter_pod_resources_up " + tc.up + "\n"; !strings.Contains(text, want) {
					t.Errorf("%q is not told", want)
				}
			})
		})
	}
}

// TestADeviceOfTheDevicePluginIsItsPods alone, and no claim's, although the ledger has a record of it.
func TestADeviceOfTheDevicePluginIsItsPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 3)
		for i, pod := range []string{"a", "b", ""} {
			uuid := r.node.GPUs[i].UUID
			r.prepared("nvidia.com.gpu."+uuid, ledger.Device{Device: r.gpu(i), GPU: r.gpu(i), UUID: uuid})
			claim := &r.records[i].Entry.Claim
			claim.Namespace, claim.Plugin = "", ledger.PluginDevice{Resource: "nvidia.com/gpu", ID: uuid}
			if pod != "" { // the third one is an init container's
				r.plugged(pod, "nvidia.com/gpu", uuid)
			}
		}
		text := r.scrape()
		for i, pod := range []string{"a", "b", ""} {
			of := `uuid="` + r.node.GPUs[i].UUID + `"`
			r.expect("all of a device", text, "stowage_gpu_memory_used_bytes", []string{"5.0331648e+08"}, of)
			r.expect("its pod's", text, "stowage_gpu_memory_used_bytes", []string{"5.0331648e+08"}, of, `pod="`+pod+`"`, `claim=""`)
		}
	})
}

// TestAPartitionOfTodayIsNotThatOfYesterday: in the place of a MIG device another one is made, for another pod.
func TestAPartitionOfTodayIsNotThatOfYesterday(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 2)
		r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		for round, pod := range []string{"a", "b"} {
			made, device := r.partitioned(0, "0", "1g.10gb", 0)
			r.runs(pod, r.prepared(pod, device), "main")
			load := uint32(10 * (round + 1))
			r.do(&nvmlsim.SetLoad{GPU: "0", Instance: &made.Instance.GPU, Load: nvmlsim.Load{SM: load}})
			text := r.scrape()
			r.expect("made", text, "stowage_gpu_memory_used_bytes", []string{"0"}, `pod="`+pod+`"`, `uuid="`+made.UUID+`"`, `device="`+device.Device+`"`)
			r.expect("made", text, "stowage_gpu_sm_util_ratio", nil, `pod="`+pod+`"`) // of two samples one was the other device's
			time.Sleep(DefaultInterval)
			r.expect("used", r.scrape(), "stowage_gpu_sm_util_ratio", []string{[]string{"0.1", "0.2"}[round]}, `pod="`+pod+`"`)
			r.do(&nvmlsim.DestroyMIG{GPU: "0", Instance: made.Instance.GPU})
			r.pods = nil
			r.plugged("other", "nvidia.com/gpu", r.node.GPUs[1].UUID)
			r.released(pod)
			time.Sleep(DefaultInterval)
		}
		text := r.scrape()
		r.expect("at the end", text, "stowage_gpu_info", nil, `uuid="MIG-`)
		r.expect("at the end", text, "stowage_gpu_memory_used_bytes", nil, r.gpu(0)) // it is partitioned still
	})
}

// sampled is a partitioned GPU whose samples can all be compared.
type sampled struct{ nvml.Device }

func (sampled) Sample(*uint32) (nvml.Sample, error) { return likeAny{}, nil }

type likeAny struct{}

func (likeAny) Since(nvml.Sample) (nvml.Rates, error) { return nvml.Rates{SMPercent: ptr(50.)}, nil }
func (likeAny) Close()                                {}

// TestRatesAreNotThoseOfTwoMIGDevices in one place, also where the driver would give some.
func TestRatesAreNotThoseOfTwoMIGDevices(t *testing.T) {
	last := samples{}
	for i, step := range []struct {
		uuid string
		want int
	}{{"MIG-1", 0}, {"MIG-1", 1}, {"MIG-2", 0}, {"MIG-2", 1}} {
		r := &reading{partitioned: true, rates: map[uint32]nvml.Rates{}, devices: []nvml.MIGUsage{{UUID: step.uuid, Instance: nvml.Instance{GPU: 7}}}}
		if err := r.sample(sampled{}, last); err != nil || len(r.rates) != step.want {
			t.Errorf("reading %d: %d rates, %v; want %d", i, len(r.rates), err, step.want)
		}
	}
	r := &reading{partitioned: true}
	if err := r.sample(sampled{}, last); err != nil || len(last) > 0 {
		t.Errorf("%d samples are kept of devices that are gone, %v", len(last), err)
	}
}

// TestXIDsAreThoseOfWhoHadTheDevice, and nobody's when that one has left.
func TestXIDsAreThoseOfWhoHadTheDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 2)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go r.exporter.Run(ctx)
		r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		made, device := r.partitioned(0, "0", "1g.10gb", 0)
		r.runs("a", r.prepared("ca", device), "main")
		r.runs("b", r.prepared("cb", ledger.Device{Device: r.gpu(1), GPU: r.gpu(1), UUID: r.node.GPUs[1].UUID}), "main")
		const errs, at = "stowage_gpu_xid_errors_total", "stowage_gpu_xid_timestamp_seconds"
		xid := func(gpu int, code uint64, instance *nvml.Instance) {
			r.exporter.Event(r.gpu(gpu), nvml.Event{Kind: nvml.EventXID, Data: code, Instance: instance})
			synctest.Wait()
			time.Sleep(2 * time.Second) // the reading takes some time
		}
		r.expect("none", r.scrape(), errs, nil)
		instance := &nvml.Instance{GPU: made.Instance.GPU, Compute: made.Instance.Compute}
		xid(0, 31, instance)
		xid(0, 31, &nvml.Instance{GPU: made.Instance.GPU, Compute: nvml.AllCompute})
		xid(0, 79, nil)
		xid(1, 13, nil)
		xid(1, 1<<40, nil)
		r.exporter.Event(r.gpu(1), nvml.Event{Kind: nvml.EventDoubleBitECC})
		text := r.scrape()
		r.expect("of the partition", text, errs, []string{"2"}, `pod="a"`, `xid="31"`, made.UUID)
		r.expect("of the GPU that is partitioned", text, errs, []string{"1"}, `pod=""`, `xid="79"`, r.gpu(0))
		r.expect("of a whole GPU", text, errs, []string{"1"}, `pod="b"`, `xid="13"`)
		r.expect("of no known number", text, errs, []string{"1"}, `pod="b"`, `xid="other"`)
		r.expect("all", text, errs, []string{"1", "2", "1", "1"})
		if n := len(found(text, at)); n != 4 {
			t.Errorf("%d times are told, want 4", n)
		}
		r.pods, r.records = r.pods[:0], nil
		r.plugged("c", "nvidia.com/gpu", r.node.GPUs[1].UUID)
		r.do(&nvmlsim.DestroyMIG{GPU: "0", Instance: made.Instance.GPU})
		time.Sleep(DefaultInterval)
		text = r.scrape()
		r.expect("when all have left", text, errs, []string{"2"}, `pod=""`, `xid="31"`, r.node.GPUs[0].UUID)
		r.expect("when all have left", text, errs, []string{"1"}, `pod=""`, `xid="13"`)
		r.expect("of who came after", text, errs, nil, `pod="c"`)
		r.expect("all", text, errs, []string{"2", "1", "1", "1"})
		stop()
		synctest.Wait()
	})
}

// TestAnXIDOfAGPUInstanceIsThatOfEachDeviceInIt, and of no device beside.
func TestAnXIDOfAGPUInstanceIsThatOfEachDeviceInIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 1)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go r.exporter.Run(ctx)
		r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		start := uint32(0)
		r.do(&nvmlsim.CreateMIG{GPU: "0", Profile: "2g.20gb", Start: &start, Compute: []uint32{1, 1}})
		r.partitioned(0, "0", "1g.10gb", 2)
		r.scrape()
		var in []nvml.MIGUsage
		byInstance := map[uint32][]nvml.MIGUsage{}
		for _, device := range r.exporter.gpus[r.gpu(0)].reading.devices {
			byInstance[device.Instance.GPU] = append(byInstance[device.Instance.GPU], device)
		}
		for _, devices := range byInstance {
			if len(devices) == 2 {
				in = devices
			}
		}
		if len(byInstance) != 2 || in == nil {
			t.Fatalf("MIG devices %v, want two in one GPU instance, and one beside", byInstance)
		}
		for i, device := range in {
			name := fmt.Sprintf("%s-mig-%d", r.gpu(0), i)
			pod := string(rune('a' + i))
			r.runs(pod, r.prepared("c"+pod, ledger.Device{
				Device: name, GPU: r.gpu(0), UUID: device.UUID, GPUUUID: r.node.GPUs[0].UUID, Partition: &ledger.Partition{Profile: "1c.2g.20gb"},
			}), "main")
		}
		for code, compute := range map[uint64]uint32{94: nvml.AllCompute, 31: in[1].Instance.Compute} {
			time.Sleep(2 * time.Second) // what was asked before is too old then
			r.exporter.Event(r.gpu(0), nvml.Event{Kind: nvml.EventXID, Data: code, Instance: &nvml.Instance{GPU: in[0].Instance.GPU, Compute: compute}})
			synctest.Wait()
		}
		time.Sleep(2 * time.Second) // the reading takes some time
		const errs = "stowage_gpu_xid_errors_total"
		text := r.scrape()
		for pod, uuid := range map[string]string{"a": in[0].UUID, "b": in[1].UUID} {
			r.expect("of the GPU instance", text, errs, []string{"1"}, `pod="`+pod+`"`, `xid="94"`, uuid)
		}
		r.expect("of the second device", text, errs, []string{"1"}, `pod="b"`, `xid="31"`, in[1].UUID)
		r.expect("all", text, errs, []string{"1", "1", "1"})
		stop()
		synctest.Wait()
	})
}

func TestXIDsAreBounded(t *testing.T) {
	x := xids{}
	for i := range uint64(2 * maxXIDs) {
		x.count(podresources.Place{GPU: "gpu-0"}, nil, event{xid: i})
	}
	var sum uint64
	for _, count := range x {
		sum += count.n
	}
	if len(x) > maxXIDs+1 || sum != 2*maxXIDs {
		t.Errorf("%d counters count %d of %d", len(x), sum, 2*maxXIDs)
	}
}

// TestOneTenantDoesNotFillTheXIDs with its many containers, of which others come with each event.
func TestOneTenantDoesNotFillTheXIDs(t *testing.T) {
	x := xids{}
	places := []podresources.Place{{GPU: "gpu-0"}, {GPU: "gpu-1", MIG: "MIG-1"}}
	const pods, rounds, codes = 2 * maxXIDHolders, 20, 5
	holder := func(namespace string, i int) podresources.Holder {
		return podresources.Holder{Namespace: namespace, Pod: fmt.Sprintf("p-%04d", i), Container: "main"}
	}
	for round := range rounds {
		for _, at := range places {
			holders := []podresources.Holder{}
			for i := (rounds - round) * pods; i < (rounds+1)*pods; i++ { // new ones are the first by their names
				holders = append(holders, holder("many", i))
			}
			if round >= rounds/2 {
				holders = append(holders, holder("one", 0))
			}
			for code := range uint64(codes) {
				x.count(at, holders, event{xid: code})
			}
		}
	}
	for _, at := range places {
		if n := x[xidKey{at, holder("one", 0), "4"}].n; n != rounds/2 {
			t.Errorf("%v: %d of %d XIDs of the tenant with one pod are its own", at, n, rounds/2)
		}
		if n := x[xidKey{at, podresources.Holder{}, "4"}].n; n != rounds {
			t.Errorf("%v: %d XIDs are nobody's, want one for each of %d", at, n, rounds)
		}
	}
	if most := len(places) * codes * (maxXIDHolders + 1 + 1); len(x) > most {
		t.Errorf("%d counters, want %d at most", len(x), most)
	}
}

// TestNamesOfAnyCharacters leave the text one that can be read: the API server takes no such names, and a kubelet or a driver may say anything.
func TestNamesOfAnyCharacters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 2)
		for i, name := range []string{"a\"}\nb\\", "\xff\x00\u2028}"} {
			r.runs(name, r.prepared(name, ledger.Device{Device: r.gpu(i), GPU: r.gpu(i), UUID: r.node.GPUs[i].UUID}), name)
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(r.scrape()))
		if err != nil {
			t.Fatal(err)
		}
		var pods []string
		for _, metric := range families["stowage_gpu_info"].GetMetric() {
			for _, label := range metric.GetLabel() {
				if label.GetName() == "pod" {
					pods = append(pods, label.GetValue())
				}
			}
		}
		if want := []string{"a\"}\nb\\", "\uFFFD\x00\u2028}"}; !slices.Equal(pods, want) {
			t.Errorf("pods %q, want %q", pods, want)
		}
	})
}

// TestConformanceFindsTheMetrics: the suite of kubernetes-sigs/ai-conformance looks for names and labels like these.
func TestConformanceFindsTheMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100", 2)
		text := r.scrape()
		for _, part := range []string{"util", "memory_used", "temp", "power", "nvlink", "pcie_tx"} {
			n := 0
			for line := range strings.Lines(text) {
				name, labels, ok := strings.Cut(line, "{")
				if ok && strings.Contains(name, part) && strings.Contains(labels, `uuid="GPU-`) && strings.Contains(labels, `gpu="`) && strings.Contains(labels, `pci_bus_id="`) {
					n++
				}
			}
			if n < 2 {
				t.Errorf("%d series of two GPUs have %q in their name, and the labels", n, part)
			}
		}
	})
}
