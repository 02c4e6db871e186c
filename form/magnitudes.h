// form/magnitudes.h: the numbers between two bounds, as digits of a grammar.
#pragma once
#include "form/grammar.h"
#include "sj.h"
#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <string>

// Decimal digits of a number, without an exponent.
struct Decimal {
    bool negative = false;
    std::string whole = "0", fraction; // without outer zeros

    static Decimal read(sj::Value v, const std::string& keyword);
    bool zero() const { return whole == "0" && fraction.empty(); }
};

// The digits of all numbers from low to high, both without their signs.
struct Magnitudes {
    static constexpr size_t DIGITS = 15; // a double distinguishes all numbers of this length

    Grammar& grammar;
    int next;
    Decimal low, high;
    bool low_in, high_in, bounded; // whether the bounds are included; whether there is an upper one
    bool integer;
    size_t places = 0;
    std::map<std::array<size_t, 4>, int> made{};

    int start();

  private:
    int digit(char from, char to, bool at_low, bool at_high, const std::function<int(bool, bool)>& rest);
    int whole(size_t n, size_t i, bool at_low, bool at_high);
    int fraction(size_t i, bool at_low, bool at_high);
};
