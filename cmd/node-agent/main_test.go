// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
)

// TestBadInputIsNamed: each error names the flag and the value, and the process would exit with it.
func TestBadInputIsNamed(t *testing.T) {
	dir := t.TempDir()
	broken := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(broken, []byte("clusters: 7"), 0o600); err != nil {
		t.Fatal(err)
	}
	base := []string{"--node-name=node-1", "--nvml=sim:t4", "--kubelet-root-dir=" + dir, "--state-dir=" + dir, "--cdi-root=" + dir, "--dev-root=" + filepath.Join(dir, "dev")}
	tests := map[string]struct {
		args []string
		want []string
	}{
		"kubeconfig that does not exist":     {args: []string{"--kubeconfig=/no/such/file"}, want: []string{"--kubeconfig", "/no/such/file"}},
		"kubeconfig that cannot be read":     {args: []string{"--kubeconfig=" + dir}, want: []string{"--kubeconfig", dir}},
		"kubeconfig that is none":            {args: []string{"--kubeconfig=" + broken}, want: []string{"--kubeconfig", broken}},
		"no kubeconfig outside of a cluster": {want: []string{"--kubeconfig", "ServiceAccount"}},
		"library that does not exist":        {args: []string{"--nvml=/no/such/libnvidia-ml.so.1"}, want: []string{"--nvml", "/no/such/libnvidia-ml.so.1", "no such library"}},
		"profile that does not exist":        {args: []string{"discover", "--nvml=sim:abacus"}, want: []string{"--nvml", "abacus"}},
		"NVML of no kind":                    {args: []string{"discover", "--nvml=maybe"}, want: []string{"--nvml", "maybe"}},
		"node name that is none":             {args: []string{"--node-name=Node 1"}, want: []string{"--node-name", "Node 1"}},
		"relative folder":                    {args: []string{"--state-dir=state"}, want: []string{"--state-dir", `"state"`, "absolute"}},
		"relative folder of simulated GPUs":  {args: []string{"--sim-dir=sim"}, want: []string{"--sim-dir", `"sim"`, "absolute"}},
		"relative folder of daemons":         {args: []string{"--mps-root=mps"}, want: []string{"--mps-root", `"mps"`, "absolute"}},
		"partitions of no kind":              {args: []string{"discover", "--partitions=some"}, want: []string{"--partitions", `"some"`, "static", "dynamic"}},
		"shares of no kind":                  {args: []string{"discover", "--share-gpus=half"}, want: []string{"--share-gpus", `"half"`, "all", "none"}},
		"shares in steps of nothing":         {args: []string{"--share-gpus=0", "--share-memory-step=0"}, want: []string{"--share-memory-step", `"0"`}},
		"sharing of no kind":                 {args: []string{"discover", "--allow-sharing=both"}, want: []string{"--allow-sharing", `"both"`, "time-slicing", "mps", "none"}},
		"shares of no strategy":              {args: []string{"discover", "--share-strategy=exclusive"}, want: []string{"--share-strategy", `"exclusive"`, "time-slicing", "mps"}},
		"shares by the device plugin":        {args: []string{"--share-gpus=all", "--advertise=device-plugin"}, want: []string{"--share-gpus=all", "--advertise=device-plugin", "all GPUs"}},
		"a share by the device plugin":       {args: []string{"--share-gpus=0000:43:00.0,0000:1b:00.0", "--advertise=dra,0000:1B:00.0=device-plugin"}, want: []string{"0000:1b:00.0 cannot be both shared"}},
		"one replica":                        {args: []string{"--share-gpus=all", "--share-replicas=1"}, want: []string{"--share-replicas=1", "2 to 100"}},
		"more replicas than percent":         {args: []string{"--share-gpus=all", "--share-replicas=101"}, want: []string{"--share-replicas=101", "2 to 100"}},
		"replicas of nothing":                {args: []string{"--share-replicas=2"}, want: []string{"--share-replicas=2", "--share-gpus=none"}},
		"replicas of one namespace":          {args: []string{"--share-gpus=all", "--share-replicas=2"}, want: []string{"--share-replicas=2", "--share-across-namespaces"}},
		"replicas by MPS without CDI":        {args: []string{"--share-gpus=all", "--share-replicas=2", "--share-across-namespaces", "--share-strategy=mps", "--device-list-strategy=envvar"}, want: []string{"--share-replicas=2", "--share-strategy=mps", "--device-list-strategy=envvar"}},
		"shares that are not allowed":        {args: []string{"--share-gpus=0", "--share-strategy=mps", "--allow-sharing=time-slicing"}, want: []string{"--share-strategy=mps", "--share-gpus=0", "--allow-sharing=time-slicing"}},
		"shared memory of no size":           {args: []string{"--mps-shm-size=much"}, want: []string{"--mps-shm-size", `"much"`}},
		"shared memory of nothing":           {args: []string{"--mps-shm-size=1"}, want: []string{"--mps-shm-size", `"1"`, "1Mi"}},
		"policy of no kind":                  {args: []string{"--leftover-processes=spare"}, want: []string{"--leftover-processes", `"spare"`, "quarantine"}},
		"policy of no kind for the host":     {args: []string{"--host-processes=kill"}, want: []string{"--host-processes", `"kill"`, "warn", "taint"}},
		"no time for a lock":                 {args: []string{"--lock-timeout=0"}, want: []string{"--lock-timeout", "0s"}},
		"a time that has passed for a lock":  {args: []string{"--lock-timeout=-1s"}, want: []string{"--lock-timeout", "-1s"}},
		"more time than the kubelet has":     {args: []string{"--lock-timeout=45s"}, want: []string{"--lock-timeout", "45s", "kubelet"}},
		"readings without a pause":           {args: []string{"--gpu-metrics-interval=999ms"}, want: []string{"--gpu-metrics-interval", "999ms", "1s"}},
		"a relative kubelet's socket":        {args: []string{"--pod-resources-socket=kubelet.sock"}, want: []string{"--pod-resources-socket", `"kubelet.sock"`, "absolute"}},
		"certificate without a key":          {args: []string{"--tls-cert-file=tls.crt"}, want: []string{"--tls-cert-file", `"tls.crt"`, "--tls-private-key-file"}},
		"key without a certificate":          {args: []string{"--tls-private-key-file=tls.key"}, want: []string{"--tls-private-key-file", `"tls.key"`, "--tls-cert-file"}},
		"output of no kind":                  {args: []string{"discover", "-o", "xml"}, want: []string{"--output", "xml", "yaml"}},
		"argument that is no flag":           {args: []string{"sail"}, want: []string{"sail"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KUBERNETES_SERVICE_HOST", "")
			cmd := newCommand()
			args := append([]string{}, base...)
			if len(tc.args) > 0 && tc.args[0] == "discover" {
				args = append([]string{"discover"}, base[:2]...)
				tc.args = tc.args[1:]
			}
			cmd.SetArgs(append(args, tc.args...))
			cmd.SetOut(io.Discard)
			cmd.SetErr(io.Discard)
			err := cmd.ExecuteContext(t.Context())
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

func TestDiscoverPrintsWhatWouldBePublished(t *testing.T) {
	cmd := newCommand()
	var out bytes.Buffer
	cmd.SetArgs([]string{"discover", "-o", "yaml", "--nvml=sim:dgx-h100", "--node-name=node-1"})
	cmd.SetOut(&out)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	decoder := utilyaml.NewYAMLOrJSONDecoder(&out, 4096)
	var devices []string
	for {
		var slice resourceapi.ResourceSlice
		err := decoder.Decode(&slice)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if slice.Kind != "ResourceSlice" || slice.Spec.Driver != "gpu.nvidia.com" || slice.Spec.Pool.Name != "node-1" || slice.Spec.Pool.ResourceSliceCount != 8 {
			t.Errorf("slice %+v", slice)
		}
		for _, device := range slice.Spec.Devices {
			devices = append(devices, device.Name)
		}
	}
	if len(devices) != 8 {
		t.Errorf("devices %v, want 8", devices)
	}
}

func TestDiscoverPrintsPartitions(t *testing.T) {
	cmd := newCommand()
	var out bytes.Buffer
	cmd.SetArgs([]string{"discover", "-o", "yaml", "--nvml=sim:dgx-h100", "--node-name=node-1", "--partitions=dynamic"})
	cmd.SetOut(&out)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"sharedCounters:", "name: gpu-0000-1b-00-0-mig-3g40gb-4", "memory-slice-7:", "resourceSliceCount: 9"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the slices lack %q", want)
		}
	}
}

func TestDiscoverPrintsShares(t *testing.T) {
	cmd := newCommand()
	var out, said bytes.Buffer
	cmd.SetArgs([]string{"discover", "-o", "yaml", "--nvml=sim:dgx-h100", "--node-name=node-1", "--share-gpus=0,99", "--share-memory-step=5Gi", "--share-strategy=mps"})
	cmd.SetOut(&out)
	cmd.SetErr(&said)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "allowMultipleAllocations: true"); n != 1 || !strings.Contains(out.String(), "step: 5Gi") {
		t.Errorf("%d devices are shared, want one, in steps of 5Gi:\n%s", n, &out)
	}
	if mps, both := strings.Count(out.String(), "string: MPS\n"), strings.Count(out.String(), "string: TimeSlicing,MPS\n"); mps != 1 || both != 7 {
		t.Errorf("%d devices say that they are shared by MPS and %d that they can be by both, want 1 and 7:\n%s", mps, both, &out)
	}
	if !strings.Contains(said.String(), "no GPU 99") {
		t.Errorf("of a GPU that is not there it said %q", &said)
	}
}

func TestTheDownwardAPIGivesDefaults(t *testing.T) {
	hostname := func() (string, error) { return "Host-1", nil }
	tests := map[string]struct {
		env  map[string]string
		want [2]string
	}{
		"in a DaemonSet":    {env: map[string]string{"NODE_NAME": "node-1", "POD_UID": "uid"}, want: [2]string{"node-1", "uid"}},
		"on a host's shell": {want: [2]string{"host-1", ""}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			opts := defaultOptions(func(key string) (string, bool) { value, ok := tc.env[key]; return value, ok }, hostname)
			if diff := cmp.Diff(tc.want, [2]string{opts.nodeName, opts.podUID}); diff != "" {
				t.Errorf("node name and pod UID (-want +got):\n%s", diff)
			}
		})
	}
}
