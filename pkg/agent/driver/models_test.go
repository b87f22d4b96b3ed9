// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/nvmlsim"
)

var updateModels = flag.Bool("update-models", false, "rewrite docs/models.md")

const modelsHead = `# Models

What the agent publishes of each machine that is simulated, and how it judges its GPUs after ten minutes of doing nothing. The table is made by
` + "`go test ./pkg/agent/driver -run TestEachModelIsDiscoveredHealthyAndPublished -update-models`" + `, and the test fails when it is not true any more.

The attributes are those that NVIDIA's DRA driver publishes, under its names, and with its values. ` + "`pkg/nvmlsim/testdata/recordings`" + ` has what
` + "`nvidia-smi -q -x`" + ` said on seven real nodes; the profiles in the column *recorded* agree with it, fact by fact.

`

// recordedProfiles are compared with recordings; see TestProfilesAreWhatWasRecorded.
var recordedProfiles = map[string]string{
	"a100-40gb": "A100", "dgx-h100": "H100", "hgx-b200": "B200", "gb200": "GB200", "gb300": "GB300", "l40s": "L40S", "t4": "T4",
}

// TestEachModelIsDiscoveredHealthyAndPublished as NVIDIA's driver would publish it, and the table says so.
func TestEachModelIsDiscoveredHealthyAndPublished(t *testing.T) {
	columns := []resourceapi.QualifiedName{
		"productName", "brand", "architecture", "cudaComputeCapability", "driverVersion", "cudaDriverVersion", "addressingMode", "nvlinkClique",
		"migCapable",
	}
	var table strings.Builder
	table.WriteString(modelsHead)
	row := func(cells ...string) { table.WriteString("| " + strings.Join(cells, " | ") + " |\n") }
	head := []string{"profile", "recorded", "GPUs", "healthy", "memory", "PCIe lanes"}
	for _, name := range columns {
		head = append(head, "`"+string(name)+"`")
	}
	row(head...)
	row(strings.Split(strings.Repeat("---,", len(head)-1)+"---", ",")...)
	for _, profile := range nvmlsim.Profiles() {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, profile)
			_, ctx := ktesting.NewTestContext(t)
			h := r.found(ctx)
			stop := background(ctx, h.Watch)
			time.Sleep(10 * time.Minute)
			resources, _ := h.Resources("node-1")
			healthy, gpus := 0, 0
			var device resourceapi.Device
			for _, slice := range resources.Pools["node-1"].Slices {
				for _, device = range slice.Devices {
					gpus++
					if v := h.Health(device.Name); v.Status == "Healthy" && len(v.Faults) == 0 && len(device.Taints) == 0 {
						healthy++
					}
					checkAttributes(t, r.machine.Profile(), device)
				}
			}
			if want := len(r.machine.Profile().GPUs); gpus != want || healthy != want {
				t.Errorf("%s: %d GPUs are published and %d healthy, want %d", profile, gpus, healthy, want)
			}
			memory := device.Capacity["memory"].Value
			link := h.monitor.Readings(device.Name).PCIe
			cells := []string{"`" + profile + "`", recordedProfiles[profile], fmt.Sprint(gpus), fmt.Sprint(healthy), memory.String(), fmt.Sprintf("%d of %d", link.Width, link.MaxWidth)}
			for _, name := range columns {
				cells = append(cells, text(device.Attributes[name]))
			}
			row(cells...)
			stop()
		})
	}
	path := filepath.Join("..", "..", "..", "docs", "models.md")
	if *updateModels {
		if err := os.WriteFile(path, []byte(table.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	written, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(written), table.String()); diff != "" {
		t.Errorf("docs/models.md (-written +found); -update-models rewrites it:\n%s", diff)
	}
}

// checkAttributes compares with what NVIDIA's DRA driver publishes of a whole GPU (cmd/gpu-kubelet-plugin/deviceinfo.go), whose values follow from the
// profile. A fabric that ends inside the machine, of a cluster whose UUID is all zeros, is no clique.
func checkAttributes(t *testing.T, p *nvmlsim.Profile, device resourceapi.Device) {
	t.Helper()
	want := map[resourceapi.QualifiedName]string{
		"type": "gpu", "productName": p.GPU.ProductName, "brand": p.GPU.Brand, "architecture": p.GPU.Architecture,
		"cudaComputeCapability": p.GPU.CUDAComputeCapability + ".0", "driverVersion": strings.ReplaceAll(p.System.DriverVersion, ".0", "."),
		"cudaDriverVersion": p.System.CUDADriverVersion + ".0", "addressingMode": p.GPU.AddressingMode,
		"migCapable": strconv.FormatBool(p.GPU.MIG != nil),
	}
	if f := p.Fabric; f != nil && !strings.HasPrefix(f.ClusterUUID, "00000000-") {
		want["nvlinkClique"] = fmt.Sprintf("%s.%d", f.ClusterUUID, f.CliqueID)
	}
	for name, value := range want {
		if got := text(device.Attributes[name]); got != value {
			t.Errorf("%s: %s of %s is %q, want %q", p.Name, name, device.Name, got, value)
		}
	}
	if _, ok := device.Attributes["nvlinkClique"]; ok != (want["nvlinkClique"] != "") {
		t.Errorf("%s: %s has a clique: %v", p.Name, device.Name, ok)
	}
	for _, name := range []resourceapi.QualifiedName{"uuid", "resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot"} {
		if text(device.Attributes[name]) == "" {
			t.Errorf("%s: %s has no %s", p.Name, device.Name, name)
		}
	}
	if memory := device.Capacity["memory"].Value; memory.Value() != int64(p.GPU.MemoryMiB)<<20 {
		t.Errorf("%s: memory of %s is %s", p.Name, device.Name, memory.String())
	}
}

func text(a resourceapi.DeviceAttribute) string {
	switch {
	case a.StringValue != nil:
		return *a.StringValue
	case a.VersionValue != nil:
		return *a.VersionValue
	case a.BoolValue != nil:
		return strconv.FormatBool(*a.BoolValue)
	}
	return ""
}
