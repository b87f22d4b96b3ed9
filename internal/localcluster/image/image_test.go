// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"stowage.dev/stowage/internal/localcluster/image/report"
)

func TestTheArchiveHoldsBothImagesAroundOneBinary(t *testing.T) {
	dir := t.TempDir()
	binary, archive := filepath.Join(dir, "binary"), filepath.Join(dir, "images.tar")
	if err := os.WriteFile(binary, []byte("the program"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Pack(binary, archive); err != nil {
		t.Fatal(err)
	}
	for ref, entrypoint := range map[string][]string{Probe: {"/probe"}, Sandbox: {"/probe", "pause"}} {
		tag, err := name.NewTag(ref)
		if err != nil {
			t.Fatal(err)
		}
		img, err := tarball.ImageFromPath(archive, &tag)
		if err != nil {
			t.Fatal(err)
		}
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(entrypoint, config.Config.Entrypoint); diff != "" || config.OS+"/"+config.Architecture != Platform {
			t.Errorf("image %s is for %s/%s, entrypoint (-want +got):\n%s", ref, config.OS, config.Architecture, diff)
		}
		layers, err := img.Layers()
		if err != nil || len(layers) != 1 {
			t.Fatalf("layers of %s: got %v, %v; want one", ref, layers, err)
		}
		content, err := layers[0].Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		files := tar.NewReader(content)
		header, err := files.Next()
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(files)
		if err != nil || header.Name != "probe" || header.Mode != 0o755 || string(data) != "the program" {
			t.Errorf("file of %s: got %+v, %q, %v", ref, header, data, err)
		}
		if _, err := files.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("there is more in %s (%v)", ref, err)
		}
	}
}

func TestTheProbeIsStaticAndPrintsOneReport(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "probe")
	if err := Compile(t.Context(), probePackage, binary); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "once")
	cmd.Env = []string{"NVIDIA_VISIBLE_DEVICES=GPU-1", "CUDA_X=1", "STOWAGE_Y=a=b", "HOME=/root"}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	got, err := report.Last(strings.NewReader("2026-01-01 something else\n" + string(out)))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-1", "CUDA_X": "1", "STOWAGE_Y": "a=b"}
	if diff := cmp.Diff(want, got.Env); diff != "" || got.VisibleDevices != "GPU-1" || got.Reason != "start" {
		t.Errorf("report %+v, env (-want +got):\n%s", got, diff)
	}
	if out, err := exec.Command(binary, "nonsense").CombinedOutput(); err == nil || !strings.Contains(string(out), `unknown mode "nonsense"`) {
		t.Errorf("unknown mode: got %q, %v", out, err)
	}
}

func TestACommandThatDoesNotCompileIsToldWithTheCompilersWords(t *testing.T) {
	err := Compile(t.Context(), "stowage.dev/stowage/no/such/package", filepath.Join(t.TempDir(), "x"))
	if err == nil || !strings.Contains(err.Error(), "compiling stowage.dev/stowage/no/such/package") {
		t.Errorf("error: got %v", err)
	}
}

func TestALogWithoutAReportIsAnError(t *testing.T) {
	for _, log := range []string{"", "nothing of interest\n", "{not json\n"} {
		if r, err := report.Last(strings.NewReader(log)); err == nil {
			t.Errorf("log %q: got %+v, want an error", log, r)
		}
	}
}
