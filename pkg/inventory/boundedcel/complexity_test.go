// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package boundedcel

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
)

const driver = "gpu.example.com"

// times is what CEL calls a list of n times the same.
func times(n int, element string) string {
	return "[" + strings.TrimSuffix(strings.Repeat(element+", ", n), ", ") + "]"
}

// grown binds the names a to d, each to what the next larger makes of the one before.
func grown(first string, larger func(name string) string, last func(name string) string) string {
	return fmt.Sprintf("cel.bind(a, %s, cel.bind(b, %s, cel.bind(c, %s, cel.bind(d, %s, %s))))", first, larger("a"), larger("b"), larger("c"), last("d"))
}

// upstreams compiles the expression as the API server does that admits it.
func upstreams(t *testing.T, text string) cel.CompilationResult {
	t.Helper()
	result := cel.GetCompiler(cel.Features{}).CompileCELExpression(text, cel.Options{EnvType: ptr.To(environment.NewExpressions)})
	if result.Error != nil || len(text) > resourceapi.CELSelectorExpressionMaxLength || result.MaxCost > resourceapi.CELSelectorExpressionMaxCost {
		t.Fatalf("the API server refuses it: %d bytes, cost %d, %v", len(text), result.MaxCost, result.Error)
	}
	return result
}

// TestExpressionsThatCELDoesNotBound has expressions that the API server admits for a small part of what they may cost, and which
// take seconds, or for ever with one level more, without a look at the context.
func TestExpressionsThatCELDoesNotBound(t *testing.T) {
	repeated := strings.Repeat("(a?){1000}", 50)
	compare := func(name string) string { return times(30, name) + " == " + times(30, name) }
	format := func(name string) string {
		return `"` + strings.Repeat("%s", 20) + `".format(` + times(20, name) + `)`
	}
	tests := map[string]struct {
		text    string
		want    error
		refused bool // before it is evaluated
	}{
		"a pattern that repeats":         {text: `"` + strings.Repeat("a", 500) + `".matches("` + repeated + `$")`, want: errRegex, refused: true},
		"many patterns that repeat":      {text: strings.Repeat(`"a".matches("[ab]{900}") || `, 30) + "true", want: errRegex, refused: true},
		"found in a text":                {text: `"` + strings.Repeat("a", 500) + `".find("` + repeated + `$") != ""`, want: errRegex, refused: true},
		"a pattern of bytes":             {text: `"aaa".matches(string(b"` + repeated + `$"))`, want: errRegex, refused: true},
		"nobody runs it":                 {text: `[].all(x, "aaa".matches("` + repeated + `$"))`, want: errRegex, refused: true},
		"not known when compiled":        {text: `cel.bind(p, "(a?){1000}" + "{20}", "aaa".matches(p) || true)`, want: nil},
		"a pattern put together":         {text: `cel.bind(p, "(a?){9" + "00}$", "` + strings.Repeat("a", 500) + `".matches(p))`, want: errRegex},
		"found by one put together":      {text: `cel.bind(p, "(a?){9" + "00}$", "` + strings.Repeat("a", 500) + `".find(p) != "")`, want: errRegex},
		"the global function":            {text: `cel.bind(p, "(a?){9" + "00}$", matches("` + strings.Repeat("a", 500) + `", p))`, want: errRegex},
		"a long text":                    {text: `"` + strings.Repeat("a", 500) + `".matches("(a?){900}$")`, want: errRegex},
		"each match looks at all":        {text: `"` + strings.Repeat("a", 5000) + `".findAll("(a*b)?").size() > 0`, want: errRegex},
		"so many of them":                {text: `"` + strings.Repeat("a", 5000) + `".findAll("(a*b)?", 4999).size() > 0`, want: errRegex},
		"lists of lists are compared":    {text: grown(times(30, "1"), func(name string) string { return times(30, name) }, compare), want: errComplex, refused: true},
		"lists of lists made by macros":  {text: grown(times(30, "1"), func(name string) string { return times(30, "1") + ".map(i, " + name + ")" }, compare), want: errComplex, refused: true},
		"lists of lists are written":     {text: grown(times(20, `"a"`), func(name string) string { return times(20, name) }, format) + ".size() > 0", want: errComplex, refused: true},
		"texts of texts":                 {text: grown(`"aaaaaaaaaa"`, format, format) + ".size() > 0", want: errComplex, refused: true},
		"what is replaced grows":         {text: `cel.bind(a, "` + strings.Repeat("a", 150) + `", cel.bind(b, a.replace("", a), b.replace("", b).size() > 0))`, want: errComplex, refused: true},
		"filters one after the other":    {text: `device.driver.split(".").filter(s, s != "").filter(s, s.startsWith("H")).filter(s, s.size() > 2).exists(s, s == "H100") || true`},
		"words that are replaced":        {text: `device.driver.lowerAscii().replace(" ", "-").replace("(", "").replace(")", "").replace("/", "-") in ["nvidia-h100-sxm", "x"] || true`},
		"a list of texts":                {text: times(200, `"GPU-7d5b9c5e-0d5e-4a52-9a38-0123456789ab"`) + `.exists(u, u.matches("^GPU-[0-9a-f-]{36}$"))`},
		"a list of texts that is bound":  {text: `cel.bind(l, ` + times(200, `"GPU-7d5b9c5e-0d5e-4a52-9a38-0123456789ab"`) + `, l.map(u, u + "x").exists(u, u == device.driver) || true)`},
		"all attributes with each other": {text: `device.attributes.all(d, device.attributes[d].all(k, k != d))`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			upstreams(t, test.text)
			compiled, err := Compile(cel.Features{}, test.text, false)
			if refused := err != nil; refused != test.refused {
				t.Fatalf("refused: %t, want %t: %v", refused, test.refused, err)
			}
			if err == nil {
				_, _, err = compiled.DeviceMatches(context.Background(), cel.Device{Driver: driver})
			}
			if test.want == nil && err != nil || test.want != nil && (err == nil || !strings.Contains(err.Error(), test.want.Error())) {
				t.Errorf("%v, want %v", err, test.want)
			}
		})
	}
}

// TestRegularExpressionsSayWhatUpstreamsSay compares those that are bounded with upstream's.
func TestRegularExpressionsSayWhatUpstreamsSay(t *testing.T) {
	for _, text := range []string{
		`"NVIDIA H200".matches("H[12]00$")`, `"NVIDIA A30".matches("H[12]00$")`, `matches(device.driver, "^gpu[.]")`, `device.driver.matches(device.driver)`,
		`device.driver.matches("^" + "gpu")`, `device.driver.matches("(" + device.driver)`, `device.driver.find("[a-z]+") == "gpu"`,
		`device.driver.find("[a-" + "z]+") == "gpu"`, `device.driver.find("[0-9]") == ""`, `device.driver.findAll("[a-z]+") == ["gpu", "example", "com"]`,
		`device.driver.findAll("[a-z]" + "+", 2) == ["gpu", "example"]`, `device.driver.findAll("[a-z]+", 0) == []`, `"".findAll("a*").size() == 1`,
		`dyn(1).matches("1")`, `device.driver.matches("` + strings.Repeat("a|", 2000) + `gpu")`,
	} {
		want, _, wantErr := ptr.To(upstreams(t, text)).DeviceMatches(context.Background(), cel.Device{Driver: driver})
		compiled, err := Compile(cel.Features{}, text, false)
		if err != nil {
			t.Fatal(text, err)
		}
		got, details, err := compiled.DeviceMatches(context.Background(), cel.Device{Driver: driver})
		if got != want || (err == nil) != (wantErr == nil) {
			t.Errorf("%.60s: %t, %v; upstream says %t, %v", text, got, err, want, wantErr)
		}
		if details == nil || ptr.Deref(details.ActualCost(), 0) == 0 {
			t.Errorf("%.60s costs nothing", text)
		}
	}
}

// TestALoopOverRegularExpressionsIsInterrupted ends the context before a loop of three rounds.
func TestALoopOverRegularExpressionsIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	compiled, err := Compile(cel.Features{}, `[1, 2, 3].all(i, device.driver.matches("^" + string(i)) || true)`, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := compiled.DeviceMatches(ctx, cel.Device{Driver: driver}); !errors.Is(err, context.Canceled) {
		t.Errorf("not interrupted: %v", err)
	}
}
