// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

var krewManifest = flag.String("krew", "../../manifests/kubectl/krew.yaml", "the manifest that TestTheManifestForKrew checks")

// krewPlugin is the format of krew's index, https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/.
type krewPlugin struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Version          string         `json:"version"`
		ShortDescription string         `json:"shortDescription"`
		Description      string         `json:"description"`
		Caveats          string         `json:"caveats"`
		Homepage         string         `json:"homepage"`
		Platforms        []krewPlatform `json:"platforms"`
	} `json:"spec"`
}

type krewPlatform struct {
	URI      string               `json:"uri"`
	Sha256   string               `json:"sha256"`
	Bin      string               `json:"bin"`
	Selector metav1.LabelSelector `json:"selector"`
	Files    []struct {
		From string `json:"from"`
		To   string `json:"to"`
	} `json:"files"`
}

// wrong is what krew, and those who look after its index, refuse in a manifest; and a version without its sums, or sums without a version.
func (p *krewPlugin) wrong() (faults []string) {
	must := func(ok bool, format string, args ...any) {
		if !ok {
			faults = append(faults, fmt.Sprintf(format, args...))
		}
	}
	must(p.APIVersion == "krew.googlecontainertools.github.com/v1alpha2" && p.Kind == "Plugin", "it is a %s of %s", p.Kind, p.APIVersion)
	must(p.Metadata.Name == "stowage", "metadata.name %q: kubectl runs kubectl-stowage as stowage", p.Metadata.Name)
	spec := &p.Spec
	must(regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`).MatchString(spec.Version),
		"spec.version %q: want a semantic one with a v", spec.Version)
	must(spec.ShortDescription != "" && len(spec.ShortDescription) <= 50 && !strings.HasSuffix(spec.ShortDescription, "."),
		"spec.shortDescription %q: want at most 50 letters without a full stop", spec.ShortDescription)
	must(spec.Description != "" && strings.HasPrefix(spec.Homepage, "https://"), "spec.description, spec.homepage: Required value")
	must(len(spec.Platforms) > 0, "spec.platforms: Required value")
	isReleased := spec.Version != "v0.0.0"
	var archives []string
	for i, platform := range spec.Platforms {
		os, arch := platform.Selector.MatchLabels["os"], platform.Selector.MatchLabels["arch"]
		must(slices.Contains([]string{"linux", "darwin", "windows"}, os) && slices.Contains([]string{"amd64", "arm64"}, arch),
			"spec.platforms[%d].selector: os %q, arch %q", i, os, arch)
		archive := fmt.Sprintf("/%s/kubectl-stowage-%s-%s.tar.gz", spec.Version, os, arch)
		must(strings.HasPrefix(platform.URI, "https://") && strings.HasSuffix(platform.URI, archive),
			"spec.platforms[%d].uri %s: want it to end with %s", i, platform.URI, archive)
		must(!slices.Contains(archives, archive), "spec.platforms[%d]: a second one for %s, %s", i, os, arch)
		archives = append(archives, archive)
		must(regexp.MustCompile(`^[0-9a-f]{64}$`).MatchString(platform.Sha256),
			"spec.platforms[%d].sha256 %q: want 64 hexadecimal digits", i, platform.Sha256)
		must(isReleased == (strings.Trim(platform.Sha256, "0") != ""),
			"spec.platforms[%d].sha256: %s of version %s", i, platform.Sha256, spec.Version)
		want := "kubectl-stowage"
		if os == "windows" {
			want += ".exe"
		}
		must(platform.Bin == want, "spec.platforms[%d].bin %q: want %q", i, platform.Bin, want)
	}
	return faults
}

// The manifest for krew is one that its index takes once a release has filled in its version, addresses and sums, all of them.
func TestTheManifestForKrew(t *testing.T) {
	manifest, err := os.ReadFile(*krewManifest)
	if err != nil {
		t.Fatal(err)
	}
	const sum = "0000000000000000000000000000000000000000000000000000000000000000"
	released := func(text string) string {
		return strings.ReplaceAll(strings.ReplaceAll(text, "v0.0.0", "v1.2.3"), sum, strings.Repeat("0a", 32))
	}
	replaced := func(from, to string) func(string) string {
		return func(text string) string { return strings.Replace(text, from, to, 1) }
	}
	for name, tc := range map[string]struct {
		change func(string) string
		want   string // in the first fault; none without it
	}{
		"as it is":              {func(text string) string { return text }, ""},
		"released":              {released, ""},
		"a version without sum": {func(text string) string { return strings.ReplaceAll(text, "v0.0.0", "v1.2.3") }, "of version v1.2.3"},
		"sums without version":  {replaced(sum, strings.Repeat("0a", 32)), "of version v0.0.0"},
		"another version's":     {replaced("releases/v0.0.0", "releases/v0.1.0"), "want it to end with /v0.0.0/kubectl-stowage-linux-"},
		"a short sum":           {replaced(sum, sum[:63]), "want 64 hexadecimal digits"},
		"another binary":        {replaced("bin: kubectl-stowage", "bin: kubectl_stowage"), `bin "kubectl_stowage"`},
		"no platform":           {replaced("os: linux", "os: plan9"), `os "plan9"`},
		"no semantic version":   {replaced("version: v0.0.0", "version: 0.0.0"), `spec.version "0.0.0"`},
		"a field that is none":  {replaced("homepage:", "homepages:"), "homepages"},
	} {
		t.Run(name, func(t *testing.T) {
			text := tc.change(string(manifest))
			if name != "as it is" && text == string(manifest) {
				t.Fatal("nothing was changed in it")
			}
			var plugin krewPlugin
			faults := plugin.wrong
			if err := yaml.UnmarshalStrict([]byte(text), &plugin); err != nil {
				faults = func() []string { return []string{err.Error()} }
			}
			if got := strings.Join(faults(), "\n"); (tc.want == "") != (got == "") || !strings.Contains(got, tc.want) {
				t.Errorf("faults %q, want %q", got, tc.want)
			}
		})
	}
}
