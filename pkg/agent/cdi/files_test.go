// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/durable"
)

// TestFilesOfOthersAreNotOurs: only what has our name is listed, and only what has our kind and the claim's devices is understood.
func TestFilesOfOthersAreNotOurs(t *testing.T) {
	const ours = "k8s.gpu.nvidia.com-claim_"
	dir := t.TempDir()
	store := cdi.NewStore(durable.OS{}, dir, "/")
	spec := func(kind string, devices ...string) string {
		text := `{"cdiVersion":"0.5.0","kind":"` + kind + `","devices":[`
		for i, device := range devices {
			text += strings.Repeat(",", min(i, 1)) + `{"name":"` + device + `","containerEdits":{}}`
		}
		return text + "]}"
	}
	const kind = cdi.Vendor + "/" + cdi.Class
	for name, content := range map[string]string{
		ours + "a-uid.json":              spec(kind, "a-uid_gpu_gpu-0", "a-uid_more.sub_gpu-1-mig-1g10gb-0"),
		ours + "b-torn.json":             `{"cdiVersion":`,
		ours + "c-kind.json":             spec("nvidia.com/gpu", "c-kind_gpu_gpu-0"),
		ours + "d-other-claim.json":      spec(kind, "a-uid_gpu_gpu-0"),
		ours + "e-name.json":             spec(kind, "gpu-0"),
		ours + "f-none.json":             spec(kind),
		ours + "g-shares.json":           spec(kind, "g-shares_gpu_gpu-0_share-1", "g-shares_gpu_gpu-0_share-2", "g-shares_more_gpu-1"),
		ours + "a-uid.json.tmp":          "{",
		ours + "a-uid.yaml":              "kind: " + kind,
		ours + ".json":                   spec(kind, "_gpu_gpu-0"),
		"nvidia.com-gpu.json":            spec("nvidia.com/gpu", "0"),
		"nvidia.com-gpu.json.tmp":        "",
		"other-k8s.gpu.nvidia.com-x.tmp": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, ours+"folder.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	files, err := store.Files()
	if err != nil {
		t.Fatal(err)
	}
	got := map[types.UID]string{}
	for _, file := range files {
		got[file.Claim] = strings.Join(file.Devices, " ")
		if file.Err != nil {
			_, reason, _ := strings.Cut(file.Err.Error(), ".json: ")
			got[file.Claim] = "error: " + reason
		}
	}
	if diff := cmp.Diff(map[types.UID]string{
		"a-uid":         "gpu-0 gpu-1-mig-1g10gb-0",
		"b-torn":        "error: unexpected end of JSON input",
		"c-kind":        `error: kind: "nvidia.com/gpu": want "k8s.gpu.nvidia.com/claim"`,
		"d-other-claim": `error: devices: name "a-uid_gpu_gpu-0": want <claim>_<request>_<device> or <claim>_<request>_<device>_<share>, of claim d-other-claim`,
		"e-name":        `error: devices: name "gpu-0": want <claim>_<request>_<device> or <claim>_<request>_<device>_<share>, of claim e-name`,
		"f-none":        "error: devices: it has none",
		"g-shares":      "gpu-0 gpu-1",
	}, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}

	unfinished, err := store.Unfinished()
	if diff := cmp.Diff([]types.UID{"a-uid"}, unfinished); err != nil || diff != "" {
		t.Errorf("unfinished: %v (-want +got):\n%s", err, diff)
	}
	before, _ := filepath.Glob(filepath.Join(dir, "*"))
	if err := errors.Join(store.RemoveUnfinished("a-uid"), store.RemoveUnfinished("z-uid")); err != nil {
		t.Error(err)
	}
	after, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(after) != len(before)-1 {
		t.Errorf("files %v, then %v; want one less", before, after)
	}
	if _, err := os.Stat(filepath.Join(dir, ours+"a-uid.json.tmp")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the unfinished file: %v", err)
	}

	// The folder may be missing for a while: it is a tmpfs.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if files, err := store.Files(); err != nil || len(files) > 0 {
		t.Errorf("without a folder: %v, %v", files, err)
	}
}

func TestAClaimIsFoundByItsDevice(t *testing.T) {
	for id, want := range map[string]types.UID{
		cdi.DeviceID("a-uid", "gpu/sub", "gpu-0"): "a-uid",
		"nvidia.com/gpu=a-uid_gpu_gpu-0":          "",
		"k8s.gpu.nvidia.com/other=a-uid_gpu_0":    "",
		"k8s.gpu.nvidia.com/claim=plain":          "",
		"a-uid_gpu_gpu-0":                         "",
	} {
		if got, ok := cdi.ClaimOfDevice(id); ok != (want != "") || ok && got != want {
			t.Errorf("%s is of claim %q, %v; want %q", id, got, ok, want)
		}
	}
}
