// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command vulncheck tells which known vulnerabilities our code calls, by govulncheck, and fails on each that is not accepted here.
//
//	vulncheck [-db https://vuln.go.dev] -- GOVULNCHECK...
//
// Its arguments are govulncheck's command line. Where the database cannot be read, a copy of it is made from the module
// golang.org/x/vulndb, which a module proxy has, too.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// accepted are the vulnerabilities that stay, by their IDs, and why. One that is not found any more has to go from here.
var accepted = map[string]string{
	"GO-2025-3521": "gitRepo volumes, which the kubelet mounts. Neither scheduler nor agent has this code; the entry names no package of " +
		"k8s.io/kubernetes, and no fix.",
	"GO-2025-3547": "A race in kube-apiserver. Neither scheduler nor agent has this code; the entry names no package of " +
		"k8s.io/kubernetes, and no fix.",
}

func main() {
	database := flag.String("db", "https://vuln.go.dev", "the database: a URL, or file:///PATH of a copy")
	flag.Parse()
	if err := run(*database, flag.Args()); err != nil {
		fmt.Fprintf(os.Stderr, "vulncheck: %v\n", err)
		os.Exit(1)
	}
}

func run(database string, govulncheck []string) error {
	if len(govulncheck) == 0 {
		return errors.New("want govulncheck's command line after the flags")
	}
	temp, err := os.MkdirTemp("", "vulncheck")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	// 1. The database.
	if err := readable(govulncheck, database); err != nil {
		fmt.Printf("%v: a copy is made from the module proxy\n", err)
		if database, err = copyDatabase(temp); err != nil {
			return fmt.Errorf("NOT CHECKED: no copy of the database: %w", err)
		}
	}
	// 2. What is found.
	output, err := command(append(slices.Clone(govulncheck), "-db", database, "-format", "json", "./..."))
	if err != nil {
		return fmt.Errorf("NOT CHECKED: %w", err)
	}
	report, err := read(bytes.NewReader(output))
	if err != nil {
		return fmt.Errorf("NOT CHECKED: govulncheck's output: %w", err)
	}
	// 3. What of it is not accepted.
	fmt.Printf("%s, %d vulnerabilities are called\n", report.goVersion, len(report.called))
	return errors.Join(judge(os.Stdout, report.called, accepted)...)
}

// readable says why govulncheck cannot read a database. It does not fail by itself, but leaves out when the database was updated.
func readable(govulncheck []string, database string) error {
	output, err := command(append(slices.Clone(govulncheck), "-db", database, "-version"))
	if err == nil && !bytes.Contains(output, []byte("DB updated: ")) {
		err = fmt.Errorf("database %s cannot be read", database)
	}
	return err
}

// copyDatabase makes a copy of the newest database that the module proxy has, and returns its URL.
func copyDatabase(temp string) (string, error) {
	output, err := command([]string{"go", "mod", "download", "-json", "golang.org/x/vulndb@latest"})
	if err != nil {
		return "", err
	}
	var module struct{ Version, Dir string }
	if err := json.Unmarshal(output, &module); err != nil {
		return "", err
	}
	fmt.Printf("golang.org/x/vulndb %s\n", module.Version)
	index := exec.Command("go", "run", "./cmd/indexdb", "-vulns", filepath.Join("data", "osv"), "-out", temp)
	index.Dir, index.Stderr = module.Dir, os.Stderr
	return "file://" + temp, index.Run()
}

func command(args []string) ([]byte, error) {
	run := exec.Command(args[0], args[1:]...)
	run.Stderr = os.Stderr
	output, err := run.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w", strings.Join(args, " "), err)
	}
	return output, err
}

// finding is a vulnerability that code of ours calls.
type finding struct {
	summary string
	modules map[string]string // where it is: the module's name to its version, and the one that has the fix
	call    string            // an example: the function of ours that is nearest to it
}

// report is what govulncheck has found.
type report struct {
	goVersion string
	called    map[string]*finding // by the vulnerability's ID
}

// read reads govulncheck's JSON messages. A finding whose trace names a function is called; others are of
// packages or modules that are only there.
func read(messages io.Reader) (report, error) {
	type frame struct {
		Module, Version, Package, Function string
	}
	found, summaries := report{called: map[string]*finding{}}, map[string]string{}
	decoder := json.NewDecoder(messages)
	for {
		var message struct {
			Config *struct {
				GoVersion string `json:"go_version"`
			}
			OSV     *struct{ ID, Summary string }
			Finding *struct {
				OSV          string
				FixedVersion string `json:"fixed_version"`
				Trace        []frame
			}
		}
		if err := decoder.Decode(&message); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return report{}, err
		}
		switch {
		case message.Config != nil:
			found.goVersion = message.Config.GoVersion
		case message.OSV != nil:
			summaries[message.OSV.ID] = message.OSV.Summary
		case message.Finding != nil && len(message.Finding.Trace) > 0 && message.Finding.Trace[0].Function != "":
			trace := message.Finding.Trace
			called := found.called[message.Finding.OSV]
			if called == nil {
				ours := trace[len(trace)-1]
				called = &finding{modules: map[string]string{}, call: strings.TrimPrefix(ours.Package, "stowage.dev/stowage/") + "." + ours.Function}
				found.called[message.Finding.OSV] = called
			}
			called.modules[trace[0].Module] = fmt.Sprintf("%s, fixed in: %s", trace[0].Version, cmp.Or(message.Finding.FixedVersion, "no version"))
		}
	}
	if found.goVersion == "" {
		return report{}, errors.New("it does not tell its configuration")
	}
	for id, called := range found.called {
		called.summary = summaries[id]
	}
	return found, nil
}

// judge prints what is called, and returns an error for each vulnerability that is not accepted, and
// for each accepted one that is not called.
func judge(out io.Writer, called map[string]*finding, accepted map[string]string) (errs []error) {
	for _, id := range slices.Sorted(maps.Keys(called)) {
		found := called[id]
		fmt.Fprintf(out, "%s: %s\n\tcalled by %s\n", id, found.summary, found.call)
		for _, module := range slices.Sorted(maps.Keys(found.modules)) {
			fmt.Fprintf(out, "\t%s %s\n", module, found.modules[module])
		}
		if why, ok := accepted[id]; ok {
			fmt.Fprintf(out, "\taccepted: %s\n", why)
			continue
		}
		errs = append(errs, fmt.Errorf("%s is called by %s", id, found.call))
	}
	for _, id := range slices.Sorted(maps.Keys(accepted)) {
		if called[id] == nil {
			errs = append(errs, fmt.Errorf("%s is accepted, and nothing calls it: take it out of internal/vulncheck", id))
		}
	}
	return errs
}
