// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../.."

// builders makes programs, in a PATH that has no others, and returns what they were told.
func builders(t *testing.T, bodies map[string]string) (path string, told func() []string) {
	t.Helper()
	path = t.TempDir()
	log := filepath.Join(t.TempDir(), "log")
	for name, body := range bodies {
		text := "#!/bin/sh\necho \"" + name + " $*\" >> " + log + "\n" + body + "\n"
		if err := os.WriteFile(filepath.Join(path, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return path, func() []string {
		data, err := os.ReadFile(log)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return slices.DeleteFunc(strings.Split(string(data), "\n"), func(line string) bool { return line == "" })
	}
}

// someImage is one with a digest, of nothing.
func someImage(name string) string { return name + ":1@sha256:" + strings.Repeat("0", 64) }

func TestMakeImages(t *testing.T) {
	program, err := exec.LookPath("make")
	if err != nil {
		t.Skip("there is no make here")
	}
	const daemonless = `[ "$1" = info ] && exit 1; exit 0`
	tests := map[string]struct {
		here   map[string]string
		args   []string
		builds []string // by which, the stage, and the image
		says   []string // and fails
	}{
		"no digest":        {here: map[string]string{"docker": ""}, args: []string{"STATIC_IMAGE=gcr.io/distroless/static-debian12:latest"}, says: []string{"STATIC_IMAGE=gcr.io/distroless/static-debian12:latest: want an image with its digest"}},
		"no base":          {here: map[string]string{"docker": ""}, args: []string{"GO_IMAGE="}, says: []string{"GO_IMAGE=: want an image with its digest"}},
		"simulated":        {here: map[string]string{"docker": ""}, args: []string{"IMAGES=node-agent-simulated"}, builds: []string{"docker node-agent-simulated stowage.dev/node-agent-simulated:dev"}},
		"none":             {says: []string{"docker: is not here", "podman: is not here", "buildah: is not here", "no image is built"}},
		"no daemon":        {here: map[string]string{"docker": daemonless}, says: []string{"docker: is here and does not work", "no image is built"}},
		"the first":        {here: map[string]string{"docker": "", "podman": ""}, builds: []string{"docker scheduler stowage.dev/scheduler:dev", "docker node-agent stowage.dev/node-agent:dev"}},
		"one that works":   {here: map[string]string{"docker": daemonless, "buildah": ""}, builds: []string{"buildah scheduler stowage.dev/scheduler:dev", "buildah node-agent stowage.dev/node-agent:dev"}},
		"what is asked":    {here: map[string]string{"docker": "", "podman": ""}, args: []string{"BUILDER=podman", "IMAGE_TAG=v1"}, builds: []string{"podman scheduler stowage.dev/scheduler:v1", "podman node-agent stowage.dev/node-agent:v1"}},
		"one that fails":   {here: map[string]string{"docker": `[ "$1" = info ] || exit 7`}, builds: []string{"docker scheduler stowage.dev/scheduler:dev"}, says: []string{"Error"}},
		"asked and absent": {here: map[string]string{"docker": ""}, args: []string{"BUILDER=podman"}, says: []string{"podman: is not here", "none of these works: podman"}},
	}
	built := regexp.MustCompile(`^(\S+) build --target (\S+) --tag (\S+) --build-arg LDFLAGS=.*-X \S+ --build-arg GO_IMAGE=` + someImage("go") + " --build-arg STATIC_IMAGE=" + someImage("static") + " --build-arg BASE_IMAGE=" + someImage("base") + ` \.$`)
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			path, told := builders(t, tc.here)
			// The version in LDFLAGS is not known without go and git.
			cmd := exec.CommandContext(t.Context(), program, append([]string{
				"-C", root, "images", "LDFLAGS=-X a=b -X c=d", "GO_IMAGE=" + someImage("go"), "STATIC_IMAGE=" + someImage("static"), "BASE_IMAGE=" + someImage("base"),
			}, tc.args...)...)
			cmd.Env = []string{"PATH=" + path}
			output, err := cmd.CombinedOutput()
			if (err != nil) != (tc.says != nil) {
				t.Errorf("%v:\n%s", err, output)
			}
			for _, says := range tc.says {
				if !strings.Contains(string(output), says) {
					t.Errorf("%q is not said:\n%s", says, output)
				}
			}
			var builds []string
			for _, line := range told() {
				if m := built.FindStringSubmatch(line); m != nil {
					builds = append(builds, strings.Join(m[1:], " "))
				} else if !strings.HasSuffix(line, " info") {
					t.Errorf("a builder was told %q", line)
				}
			}
			if diff := cmp.Diff(tc.builds, builds); diff != "" {
				t.Errorf("builds (-want +got):\n%s", diff)
			}
		})
	}
}

// An agent for real GPUs has nothing in it that simulates any, and no image but the one for that has it or nvmlsimctl. No base is named by a tag alone.
func TestNoGPUsAreSimulatedInProduction(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the agent twice: run without -short")
	}
	dockerfile := read(t, "Dockerfile")
	if m := regexp.MustCompile(`(?m)^ARG \w*IMAGE=.*$`).FindString(dockerfile); m != "" {
		t.Errorf("a base has a default: %s", m)
	}
	for image, others := range map[string][]string{"scheduler": nil, "node-agent": {"nvidia-cdi-hook"}} { // NVIDIA's, see TestTheImageHasTheHookOfItsLibrary
		_, stage, _ := strings.Cut(dockerfile, " AS "+image+"\n")
		stage, _, _ = strings.Cut(stage, "\nFROM ")
		for line := range strings.Lines(stage) {
			copied := func(program string) bool { return line == "COPY --from=build /out/"+program+" /"+program+"\n" }
			if strings.HasPrefix(line, "COPY") && !copied(image) && !slices.ContainsFunc(others, copied) {
				t.Errorf("image %s: %s", image, line)
			}
		}
	}
	const tags = "nosim"
	if !strings.Contains(dockerfile, " -tags "+tags+` -ldflags "${LDFLAGS}" -o /out/ ./cmd/node-agent`+"\n") {
		t.Error("the agent is built with what simulates GPUs")
	}
	simulates := []byte("stowage/pkg/nvmlsim.LoadProfile")
	for tag, want := range map[string]bool{"": true, tags: false} {
		agent := filepath.Join(t.TempDir(), "node-agent")
		if out, err := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-tags", tag, "-o", agent, root+"/cmd/node-agent").CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		program, err := os.ReadFile(agent)
		if err != nil {
			t.Fatal(err)
		}
		if got := bytes.Contains(program, simulates); got != want {
			t.Errorf("built with tags %q it simulates: %t", tag, got)
		}
		if want {
			continue
		}
		out, err := exec.CommandContext(t.Context(), agent, "discover", "--nvml=sim:dgx-h100", "--node-name=a").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "built without simulated GPUs") {
			t.Errorf("told to simulate: %v\n%s", err, out)
		}
	}
}

// TestTheManifestsImagesAreBuilt: each image that a workload names is a stage, runs as the workload wants it, and gets what it is built from.
func TestTheManifestsImagesAreBuilt(t *testing.T) {
	dockerfile := read(t, "Dockerfile")
	ignored := read(t, ".dockerignore")
	for _, m := range regexp.MustCompile(`(?m)^COPY ([^-\n].*) \S+$`).FindAllStringSubmatch(dockerfile, -1) {
		for source := range strings.FieldsSeq(m[1]) {
			if _, err := os.Stat(filepath.Join(root, source)); err != nil || !strings.Contains(ignored, "\n!"+source+"\n") {
				t.Errorf("%s is copied, and is not there or is ignored: %v", source, err)
			}
		}
	}
	for image, manifest := range map[string]string{
		"scheduler": "manifests/base/scheduler/deployment.yaml", "node-agent": "manifests/base/node-agent/daemonset.yaml",
		"kubectl-stowage": "manifests/overlays/map/deployment.yaml",
	} {
		if !strings.Contains(read(t, manifest), "image: stowage.dev/"+image+"\n") {
			t.Errorf("%s does not name the image %s", manifest, image)
		}
		_, stage, ok := strings.Cut(dockerfile, " AS "+image+"\n")
		if !ok {
			t.Fatalf("the Dockerfile has no stage %s", image)
		}
		stage, _, _ = strings.Cut(stage, "\nFROM ")
		user := "0:0"
		if m := regexp.MustCompile(`runAsUser: (\d+)\s+runAsGroup: (\d+)`).FindStringSubmatch(read(t, manifest)); m != nil {
			user = m[1] + ":" + m[2]
		}
		from := "build"
		if strings.Contains(dockerfile, "\nFROM build AS build-"+image+"\n") {
			from += "-" + image
		}
		_, build, _ := strings.Cut(dockerfile, " AS "+from+"\n")
		build, _, _ = strings.Cut(build, "\nFROM ")
		for _, line := range []string{"COPY --from=" + from + " /out/" + image + " /" + image, "USER " + user, `ENTRYPOINT ["/` + image + `"]`} {
			if !strings.Contains(stage+"\n", line+"\n") {
				t.Errorf("stage %s lacks %q:\n%s", image, line, stage)
			}
		}
		if !strings.Contains(build, " ./cmd/"+image) {
			t.Errorf("%s is not built:\n%s", image, build)
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
